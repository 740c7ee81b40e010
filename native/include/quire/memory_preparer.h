// Prepares memory while no step runs, so that steps need not wait for the system.
//
// The system allocates memory when it is first written, a page at a time, and clears each page. A step that writes new
// keys would wait for that. Small pages are allocated quickly, so an engine starts with them; huge pages are read
// faster. So a separate thread goes over the memory once, in pieces of 2 MiB: it allocates missing pages, and merges
// small pages into huge ones.
//
//     step      ├──────┤ ├──────┤                          ├──────┤
//     preparer                      20 ms idle: ├─┤├─┤├─┤├─┤         20 ms idle: ├─┤├─┤ …
//
// All of this is advice to the system: it changes no byte, and memory may be freed meanwhile. Systems other than
// Linux, and Linux before 5.14, ignore it; then memory is allocated as it is used.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "quire/buffers.h"

namespace quire {

class MemoryPreparer {
  public:
    MemoryPreparer();
    ~MemoryPreparer();
    MemoryPreparer(const MemoryPreparer&) = delete;
    MemoryPreparer& operator=(const MemoryPreparer&) = delete;

    // Prepares these ranges from now on instead of earlier ones: first piece 0 of each range, then piece 1 of each …
    // Throws std::bad_alloc, and std::system_error if a thread cannot be started.
    void start(const std::vector<MemoryRange>& ranges);

    // The number of pieces still to prepare.
    std::size_t num_left() const { return num_left_.load(std::memory_order_acquire); }

    // While a Pause exists, no piece is begun.
    class Pause {
      public:
        explicit Pause(MemoryPreparer& preparer) : preparer_(preparer) { preparer_.num_pauses_.fetch_add(1); }
        ~Pause();
        Pause(const Pause&) = delete;
        Pause& operator=(const Pause&) = delete;

      private:
        MemoryPreparer& preparer_;
    };

  private:
    using Clock = std::chrono::steady_clock;

    // A forked process lacks this thread, and must neither use nor destroy its state.
    struct Crew {
        std::mutex mutex;
        std::condition_variable stop_asked;
        bool stopping = false;
        std::thread thread;
    };

    void stop();
    void work(Crew& crew, const std::vector<MemoryRange>& pieces);
    bool idle() const;

    const pid_t home_;  // the process that has the thread
    std::unique_ptr<Crew> crew_;
    std::atomic<std::size_t> num_left_{0};
    std::atomic<int> num_pauses_{0};
    std::atomic<Clock::rep> last_end_{0};  // of a pause
};

}  // namespace quire
