"""How a model is divided over devices: meshes, FSDP, tensor parallelism, initialisation."""
