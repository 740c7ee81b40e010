// A team of threads that goes through a step together.
//
//     run ──► every member: for_pieces ──► barrier ──► for_pieces ──► barrier ──► … ──► run returns
//
// The pieces of a phase are claimed from one counter: a core that the system takes away for a while
// holds up the piece it has, not a fixed share of the phase. Who computes a piece never changes
// what comes out. Waiting spins for some microseconds, since a phase is about as long, and then
// sleeps, so that an idle engine and an oversubscribed machine are left in peace.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace quire {

class ThreadTeam {
  public:
    class Member {
      public:
        Member(ThreadTeam& team, int index) : team_(team), index_(index) {}

        // 0 … size - 1; says which scratch memory is the member's own.
        int index() const { return index_; }

        // Calls work(piece) for the pieces 0 … num_pieces - 1, spread over the team; returns when
        // all of them are done. Every member must come here with the same number.
        template <typename Work>
        void for_pieces(int num_pieces, Work work) {
            for (;;) {
                const int piece = team_.next_piece_.fetch_add(1, std::memory_order_relaxed);
                if (piece >= num_pieces) break;
                work(piece);
            }
            barrier();
        }

        // Work that one member does while the others wait.
        template <typename Work>
        void once(Work work) {
            for_pieces(1, [&](int) { work(); });
        }

        void barrier() { team_.barrier(); }

      private:
        ThreadTeam& team_;
        int index_;
    };

    // The calling thread of `run` is one of the members. Throws std::system_error where the system
    // lets no more threads start.
    explicit ThreadTeam(int num_threads);
    ~ThreadTeam();
    ThreadTeam(const ThreadTeam&) = delete;
    ThreadTeam& operator=(const ThreadTeam&) = delete;

    int size() const { return num_threads_; }

    // Every member runs `work`, which must not throw; returns when all have. One caller at a time.
    void run(const std::function<void(Member&)>& work);

  private:
    void barrier();
    void stop();
    void serve(int index);
    static void await_change(const std::atomic<std::uint32_t>& value, std::uint32_t old);

    const int num_threads_;
    const std::function<void(Member&)>* work_ = nullptr;
    bool stopping_ = false;
    // Each on a cache line of its own: they are written by all members.
    alignas(64) std::atomic<int> next_piece_{0};
    alignas(64) std::atomic<int> num_arrived_{0};
    alignas(64) std::atomic<std::uint32_t> num_barriers_{0};
    alignas(64) std::atomic<std::uint32_t> num_runs_{0};
    std::vector<std::thread> threads_;
};

}  // namespace quire
