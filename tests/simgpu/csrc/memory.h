// Owns memory: a stream-ordered allocator that overwrites what is freed with NaN, and pinned memory of the host.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>
#include "streams.h"

namespace simgpu {

constexpr c10::DeviceType TYPE = c10::DeviceType::PrivateUse1;
inline c10::Device device() { return c10::Device(TYPE, 0); }

constexpr int NAN_BYTE = 0xFF;  // as any floating dtype: NaN
constexpr size_t LARGE_PINNED = size_t(4) << 20;  // slabs: to write to all of their pages would take most of a test's time

struct Block {
  char* data;
  size_t nbytes;
  Stream* owner;  // whose turn it was when it was allocated
  std::set<Stream*> users;  // others, by record_stream
  std::vector<std::pair<Stream*, uint64_t>> after;  // freed, and these still look at it
};

// As CUDA's caching allocator: a freed block may be used again by whatever its own stream does next, and waits only for the streams
// that were recorded.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &Allocator::free, device()};
    size_t rounded = (nbytes + 511) / 512 * 512;
    Stream* owner = current();
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_unused();
    auto& free = free_[owner];
    auto fitting = free.lower_bound(rounded);
    Block* block;
    if (fitting != free.end() && fitting->first <= 2 * rounded) {
      block = fitting->second;
      free.erase(fitting);
    } else {
      void* data = nullptr;
      TORCH_CHECK(posix_memalign(&data, 512, rounded) == 0, "simgpu: out of memory");
      std::memset(data, NAN_BYTE, rounded);
      block = new Block{static_cast<char*>(data), rounded, owner, {}, {}};
      reserved_ += rounded;
    }
    live_[block->data] = block;
    allocated_ += block->nbytes;
    peak_ = std::max(peak_, allocated_);
    return {block->data, block->data, &Allocator::free, device()};
  }

  static void free(void* data) {
    if (data) instance().give_back(static_cast<char*>(data));
  }

  static Allocator& instance() {
    static Allocator* one = new Allocator;
    return *one;
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(static_cast<char*>(data.get()));
    if (found != live_.end()) found->second->users.insert(streams().at(stream.id()));
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::free; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = allocated_;
    stats.allocated_bytes[0].peak = peak_;
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = reserved_;  // which is never given back
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = allocated_;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) { return {size_t(1) << 34, size_t(1) << 34}; }

 private:
  void give_back(char* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = live_.at(data);
    live_.erase(data);
    allocated_ -= block->nbytes;
    block->after.clear();
    for (Stream* user : block->users)
      if (user != block->owner) block->after.emplace_back(user, user->last());
    block->users.clear();
    if (block->after.empty())
      overwrite(block);
    else
      in_use_.push_back(block);
  }

  // Whoever is next on the owner's stream may overwrite it: somebody does, at once.
  void overwrite(Block* block) {
    block->owner->launch([block_data = block->data, nbytes = block->nbytes] { std::memset(block_data, NAN_BYTE, nbytes); }, 0);
    free_[block->owner].emplace(block->nbytes, block);
  }

  void take_back_unused() {
    std::vector<Block*> still;
    for (Block* block : in_use_) {
      bool is_over = true;
      for (auto& [stream, ticket] : block->after) is_over = is_over && stream->is_over(ticket);
      if (is_over)
        overwrite(block);
      else
        still.push_back(block);
    }
    in_use_.swap(still);
  }

  std::mutex mutex_;
  std::unordered_map<char*, Block*> live_;
  std::map<Stream*, std::multimap<size_t, Block*>> free_;
  std::vector<Block*> in_use_;
  int64_t allocated_ = 0, peak_ = 0, reserved_ = 0;
};

// Pinned memory is never used again, so whoever reads it too early finds NaN or what was there before.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(&data, 4096, nbytes) == 0, "simgpu: no pinned memory");
      if (nbytes <= LARGE_PINNED) std::memset(data, NAN_BYTE, nbytes);
      std::lock_guard<std::mutex> lock(mutex_);
      ranges_[static_cast<const char*>(data)] = nbytes;
    }
    return {data, data, &keep, at::kCPU};
  }
  bool holds(const void* pointer) {
    auto data = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = ranges_.upper_bound(data);
    if (after == ranges_.begin()) return false;
    --after;
    return data < after->first + after->second;
  }
  static PinnedAllocator& instance() {
    static PinnedAllocator* one = new PinnedAllocator;
    return *one;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &keep; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void keep(void*) {}
  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;
};

}  // namespace simgpu
