// Hooks and a device guard for CUDA that do nothing: autograd then runs on fake CUDA tensors in a
// process that has no GPU. To be loaded before torch asks for either, so before Python imports it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct NoGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device first() { return Device(DeviceType::CUDA, 0); }
  static Stream only() { return Stream(Stream::DEFAULT, first()); }
  Device exchangeDevice(Device) const override { return first(); }
  Device getDevice() const override { return first(); }
  Stream getStream(Device) const noexcept override { return only(); }
  Stream getNewStream(Device, int) const override { return only(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream exchangeStream(Stream) const noexcept override { return only(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct NoHooks final : at::CUDAHooksInterface {
  explicit NoHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
};

const int registered = [] {
  static NoGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  // Preferred: a build of torch with CUDA registers its own hooks under this name afterwards.
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<NoHooks>(args);
      },
      c10::REGISTRY_PREFERRED);
  return 0;
}();

} // namespace
