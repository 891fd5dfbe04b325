// Owns what torch asks of a device: its guard (streams, events) and its hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include "memory.h"

namespace simgpu {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  c10::Stream getStream(c10::Device) const override { return stream(current_id()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(streams().make()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(streams().make()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = current_id();
    current_id() = next.id();
    return stream(before);
  }
  bool queryStream(const c10::Stream& asked) const override {
    Stream* one = streams().at(asked.id());
    return one->is_over(one->last());
  }
  void synchronizeStream(const c10::Stream& asked) const override {
    Stream* one = streams().at(asked.id());
    synchronise(one, one->last(), "stream");
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (Stream* one : streams().all()) one->wait(one->last());
    counters().add(counters().synchronisations, "device");
    raise_what_failed();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    auto one = static_cast<Event*>(*event);
    one->stream = streams().at(stream.id());
    one->ticket = one->stream->last();
    one->moment = one->stream->clock();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Event one = *static_cast<Event*>(event);
    Stream* blocked = streams().at(stream.id());
    if (!one.stream || one.stream == blocked) return;
    if (blocked->stall(one.moment)) {
      std::lock_guard<std::mutex> lock(counters().mutex);
      ++counters().stalls[{blocked->id, one.stream->id}];
    }
    blocked->launch([one] { one.stream->wait(one.ticket); }, 0);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override {
    auto one = static_cast<Event*>(event);
    return !one || !one->stream || one->stream->is_over(one->ticket);
  }
  void synchronizeEvent(void* event) const override {
    auto one = static_cast<Event*>(event);
    if (one && one->stream) synchronise(one->stream, one->ticket, "event");
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Allocator::instance().recordStream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::instance(); }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::instance().holds(data); }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto impl = storage.unsafeGetStorageImpl();
    c10::DataPtr fresh = Allocator::instance().allocate(nbytes);
    size_t kept = std::min(nbytes, impl->nbytes());
    if (kept) current()->launch([to = fresh.get(), from = impl->data(), kept] { std::memcpy(to, from, kept); });
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};

}  // namespace simgpu
