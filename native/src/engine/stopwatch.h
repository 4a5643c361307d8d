// Where the time of forward passes goes, for those who ask: seconds by part, nothing counted twice.
#pragma once
#include <array>
#include <chrono>

namespace w4conv {

enum class Part { kRest, kGemm, kAttention, kHead };
constexpr int kParts = 4;

class Stopwatch {
 public:
  void restart() {
    running_ = true;
    seconds_ = {};
  }
  const std::array<double, kParts>& seconds() const { return seconds_; }

  // The part that the time belongs to while this object lives; what was before it goes on afterwards.
  class Lap {
   public:
    Lap(Stopwatch& watch, Part part) : watch_(watch), outer_(watch.part_), outermost_(!watch.inside_) {
      if (!watch.running_) return;
      outermost_ ? (void)(watch.since_ = Clock::now()) : watch.count();
      watch.part_ = part;
      watch.inside_ = true;
    }
    ~Lap() {
      if (!watch_.running_) return;
      watch_.count();
      watch_.part_ = outer_;
      watch_.inside_ = !outermost_;
    }
    Lap(const Lap&) = delete;
    Lap& operator=(const Lap&) = delete;

   private:
    Stopwatch& watch_;
    Part outer_;
    bool outermost_;
  };

 private:
  using Clock = std::chrono::steady_clock;
  void count() {
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<size_t>(part_)] += std::chrono::duration<double>(now - since_).count();
    since_ = now;
  }
  bool running_ = false, inside_ = false;
  Part part_ = Part::kRest;
  Clock::time_point since_;
  std::array<double, kParts> seconds_{};
};

}  // namespace w4conv
