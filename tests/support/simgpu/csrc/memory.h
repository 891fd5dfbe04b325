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

// As in c10/core/AllocatorConfig.h. See zeroshard/tools/planning/segments.py, which plans with the same rules.
constexpr size_t BLOCK = 512, SMALL = size_t(1) << 20, SMALL_SEGMENT = size_t(2) << 20, LARGE_SEGMENT = size_t(20) << 20,
                 LARGE = size_t(10) << 20, ROUND = size_t(2) << 20;

struct Block {
  char* data;
  size_t nbytes;
  Stream* owner;  // whose turn it was when it was allocated
  bool is_small;
  Block *before = nullptr, *behind = nullptr;  // its neighbours in the segment
  bool is_free = false;
  std::set<Stream*> users;  // others, by record_stream
  std::vector<std::pair<Stream*, uint64_t>> after;  // freed, and these still look at it
};

// As CUDA's caching allocator: a freed block may be used again by whatever its own stream does next, and waits only for the streams
// that were recorded. Unless it packs, each block is a segment, so that a test sees small blocks in what is reserved.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &Allocator::free, device()};
    size_t size = (nbytes + BLOCK - 1) / BLOCK * BLOCK;
    Stream* owner = current();
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_unused();
    bool is_small = packs_ && size <= SMALL;
    auto& free = free_[{owner, is_small}];
    auto fitting = free.lower_bound({size, nullptr});
    Block* block;
    if (fitting != free.end() && (packs_ || fitting->first.first <= 2 * size)) {
      block = fitting->second;
      free.erase(fitting);
    } else {
      block = make_segment(size, owner, is_small);
    }
    block->is_free = false;
    if (size_t rest = block->nbytes - size; packs_ && (rest > SMALL || (is_small && rest))) {
      auto behind = new Block{block->data + size, rest, owner, is_small, block, block->behind};
      if (behind->behind) behind->behind->before = behind;
      block->behind = behind;
      block->nbytes = size;
      add_free(behind);
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

  // Put blocks into segments of CUDA's sizes from now on.
  void pack() {
    std::lock_guard<std::mutex> lock(mutex_);
    packs_ = true;
    free_.clear();  // blocks of their own; nobody uses them again
    reserved_ = allocated_;
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
  Block* make_segment(size_t size, Stream* owner, bool is_small) {
    size_t nbytes = size;
    if (packs_ && is_small)
      nbytes = SMALL_SEGMENT;
    else if (packs_)
      nbytes = size < LARGE ? LARGE_SEGMENT : (size + ROUND - 1) / ROUND * ROUND;
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, BLOCK, nbytes) == 0, "simgpu: out of memory");
    std::memset(data, NAN_BYTE, nbytes);
    reserved_ += nbytes;
    return new Block{static_cast<char*>(data), nbytes, owner, is_small};
  }

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
    if (block->behind && block->behind->is_free) join(block, block->behind);
    if (block->before && block->before->is_free) {
      Block* before = block->before;
      join(before, block);
      block = before;
    }
    add_free(block);
  }

  // Make one block of two neighbours.
  void join(Block* block, Block* behind) {
    for (Block* one : {block, behind})
      if (one->is_free) free_[{one->owner, one->is_small}].erase({one->nbytes, one->data});
    block->nbytes += behind->nbytes;
    block->behind = behind->behind;
    if (block->behind) block->behind->before = block;
    delete behind;
  }

  void add_free(Block* block) {
    block->is_free = true;
    free_[{block->owner, block->is_small}][{block->nbytes, block->data}] = block;
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
  bool packs_ = false;
  std::unordered_map<char*, Block*> live_;
  std::map<std::pair<Stream*, bool>, std::map<std::pair<size_t, char*>, Block*>> free_;
  std::vector<Block*> in_use_;
  int64_t allocated_ = 0, peak_ = 0, reserved_ = 0;
};

// Pinned memory is never used again, so whoever reads it too early finds NaN or what was there before. What is live is counted.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(&data, 4096, nbytes) == 0, "simgpu: no pinned memory");
      if (nbytes <= LARGE_PINNED) std::memset(data, NAN_BYTE, nbytes);
      std::lock_guard<std::mutex> lock(mutex_);
      ranges_[static_cast<const char*>(data)] = nbytes;
      live_ += nbytes;
      peak_ = std::max(peak_, live_);
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
  void reset_peak_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = live_;
  }
  // Bytes that are live now, and the most since the last reset.
  std::pair<int64_t, int64_t> counts() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {live_, peak_};
  }

 private:
  static void keep(void* data) {
    auto& self = instance();
    std::lock_guard<std::mutex> lock(self.mutex_);
    auto found = self.ranges_.find(static_cast<const char*>(data));
    if (found != self.ranges_.end()) self.live_ -= found->second;
  }
  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;
  int64_t live_ = 0, peak_ = 0;
};

}  // namespace simgpu
