// Owns streams and events: a stream is a thread that runs kernels in order, at its pace; and what is counted.
#pragma once
#include <c10/util/Exception.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace simgpu {

using Counts = std::map<std::string, int64_t>;

struct Counters {
  std::mutex mutex;
  Counts launches, synchronisations, pageable_copies;
  std::map<std::pair<int64_t, int64_t>, int64_t> stalls;  // by the stream that waited, and the one that it waited for
  std::string error;  // of the first kernel that failed since the last synchronisation
  void add(Counts& counts, const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex);
    ++counts[what];
  }
};

inline Counters& counters() {
  static Counters* all = new Counters;
  return *all;
}

inline void launched(const std::string& what) { counters().add(counters().launches, what); }

// How a stream runs its kernels. A lazy one waits until the host waits for it, or has launched and waited for nothing during
// its patience: on a real device everything is done at some time, and a host that waits for another rank may wait for just that.
struct Pace {
  bool is_lazy = false;
  int delay_us = 0;
};
constexpr int64_t COPY_TICKS = 3;  // of a copy to or from the host: a kernel takes one

using Clock = std::chrono::steady_clock;

inline std::atomic<int64_t>& patience_ms() {
  static std::atomic<int64_t> milliseconds{150};
  return milliseconds;
}

inline std::atomic<Clock::rep>& last_activity() {
  static std::atomic<Clock::rep> ticks{0};
  return ticks;
}

inline void host_is_active() { last_activity() = Clock::now().time_since_epoch().count(); }

inline Clock::time_point idle_at() {
  return Clock::time_point(Clock::duration(last_activity().load())) + std::chrono::milliseconds(patience_ms().load());
}

class Stream {
 public:
  Stream(int64_t id, Pace pace) : id(id), pace_(pace) {}

  // `ticks`: what it takes in the time of the counters, see `stall`.
  uint64_t launch(std::function<void()> kernel, int64_t ticks = 1) {
    uint64_t ticket;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      clock_ += ticks;
      if (!has_thread_) {  // no earlier: processes are forked that have made streams
        std::thread([this] { run(); }).detach();
        has_thread_ = true;
      }
      host_is_active();
      waiting_.push_back(std::move(kernel));
      ticket = ++launched_;
      if (!pace_.is_lazy) wanted_ = launched_;
    }
    changed_.notify_all();
    return ticket;
  }

  // Block until the kernel of this ticket, and all before it, have run.
  void wait(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = std::max(wanted_, ticket);
    changed_.notify_all();
    changed_.wait(lock, [&] { return done_ >= ticket; });
  }

  uint64_t last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return launched_;
  }

  bool is_over(uint64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= ticket;
  }

  // Streams have a time of their own, which threads and their turns do not change: each kernel takes a tick. So it is certain
  // whether a wait would hold a stream up on a device whose host is far ahead.
  int64_t clock() {
    std::lock_guard<std::mutex> lock(mutex_);
    return clock_;
  }

  // What comes next comes after `moment`. Returns whether that holds this stream up.
  bool stall(int64_t moment) {
    std::lock_guard<std::mutex> lock(mutex_);
    bool is_early = clock_ < moment;
    clock_ = std::max(clock_, moment);
    return is_early;
  }

  void set_pace(Pace pace) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      pace_ = pace;
      if (!pace_.is_lazy) wanted_ = launched_;
    }
    changed_.notify_all();
  }

  const int64_t id;

 private:
  void run() {
    for (;;) {
      std::function<void()> kernel;
      int delay_us;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !waiting_.empty(); });
        while (done_ >= wanted_ && Clock::now() < idle_at()) changed_.wait_until(lock, idle_at());
        kernel = std::move(waiting_.front());
        waiting_.pop_front();
        delay_us = pace_.delay_us;
      }
      if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      try {
        kernel();
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(counters().mutex);
        if (counters().error.empty()) counters().error = error.what();
      }
      kernel = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++done_;
      }
      changed_.notify_all();
    }
  }

  Pace pace_;
  bool has_thread_ = false;
  std::deque<std::function<void()>> waiting_;
  uint64_t launched_ = 0, wanted_ = 0, done_ = 0;
  int64_t clock_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// All streams; they live as long as the process. Number 0 is the default stream. The paces of the others are given in turn.
class Streams {
 public:
  Stream* at(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (static_cast<int64_t>(all_.size()) <= id) {
      int64_t next = all_.size();
      all_.push_back(new Stream(next, pace(next)));
    }
    return all_[id];
  }
  int64_t make() {
    int64_t id = next_++;
    at(id);
    return id;
  }
  std::vector<Stream*> all() {
    std::lock_guard<std::mutex> lock(mutex_);
    return all_;
  }
  void set_paces(Pace of_default, std::vector<Pace> of_others) {
    std::lock_guard<std::mutex> lock(mutex_);
    of_default_ = of_default;
    of_others_ = std::move(of_others);
    for (Stream* stream : all_) stream->set_pace(pace(stream->id));
  }

 private:
  Pace pace(int64_t id) const { return id == 0 ? of_default_ : of_others_[(id - 1) % of_others_.size()]; }
  std::mutex mutex_;
  std::vector<Stream*> all_;
  std::atomic<int64_t> next_{1};
  Pace of_default_;
  std::vector<Pace> of_others_{Pace{}};
};

inline Streams& streams() {
  static Streams* all = new Streams;
  return *all;
}

inline int64_t& current_id() {
  static thread_local int64_t id = 0;
  return id;
}

inline Stream* current() { return streams().at(current_id()); }

inline void raise_what_failed() {
  std::string error;
  {
    std::lock_guard<std::mutex> lock(counters().mutex);
    std::swap(error, counters().error);
  }
  TORCH_CHECK(error.empty(), "a kernel failed on simgpu: ", error);
}

// The host blocks. `why` is what is counted.
inline void synchronise(Stream* stream, uint64_t ticket, const std::string& why) {
  counters().add(counters().synchronisations, why);
  host_is_active();
  stream->wait(ticket);
  raise_what_failed();
}

struct Event {
  Stream* stream = nullptr;
  uint64_t ticket = 0;
  int64_t moment = 0;  // of the stream's clock
};

}  // namespace simgpu
