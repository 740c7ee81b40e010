// A team of threads that goes through a step together.
//
//     run ──► every member: for_pieces ─► for_pieces ─► … ──► run returns when the last phase is done
//                           phase p       phase p + 1
//
// The pieces of a phase are claimed from one counter, and a phase ends when all of its *pieces* are
// done, not when all members have come. So a member that the system takes a core away from holds up
// the one piece that it has, if it has one. The others go on without it, into the next phases and
// the next runs; when it comes back it finds the phases that it missed done, and catches up by
// passing over them. Who computes a piece never changes what comes out.
//
//     member 0   ├ piece 0 ┼ piece 2 ┼ piece 3 ┤ phase p + 1: ├ piece 0 ┼ …
//     member 1   ├ piece 1 ┤ no core ……………………………………………………………………………┤ passes over p, joins p + 1
//
// Waiting spins for some microseconds, since a phase is about as long, and then sleeps, so that an
// idle engine and an oversubscribed machine are left in peace.
//
// A process that was forked has a copy of the team without its threads, which were perhaps in the
// middle of a run. There nothing waits for them: `quiesce` returns at once, and so does the destructor.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

class ThreadTeam {
  public:
    class Member {
      public:
        Member(ThreadTeam& team, int index, std::uint32_t first_phase)
            : team_(team), index_(index), phase_(first_phase) {}

        // 0 … size - 1; says which scratch memory is the member's own.
        int index() const { return index_; }

        // Calls work(piece) for the pieces 0 … num_pieces - 1, spread over the team; returns when
        // all of them are done. Every member comes here for the same phases in the same order; the
        // number of pieces counts only while the phase lasts.
        template <typename Work>
        void for_pieces(int num_pieces, Work work) {
            for (int piece; (piece = team_.claim(phase_, num_pieces)) >= 0;) {
                work(piece);
                team_.complete(phase_, num_pieces);
            }
            team_.await_end(phase_);
            ++phase_;
        }

        // Work that one member does while the others wait.
        template <typename Work>
        void once(Work work) {
            for_pieces(1, [&](int) { work(); });
        }

      private:
        ThreadTeam& team_;
        const int index_;
        std::uint32_t phase_;
    };

    using Work = std::function<void(Member&)>;

    // The calling thread of `run` is one of the members. Throws std::system_error where the system
    // lets no more threads start.
    explicit ThreadTeam(int num_threads);
    ~ThreadTeam();
    ThreadTeam(const ThreadTeam&) = delete;
    ThreadTeam& operator=(const ThreadTeam&) = delete;

    int size() const { return num_threads_; }

    // Members run `work`, which must not throw; returns when its phases are done. One caller at a
    // time. A member that is late may still be passing over the phases of `work` afterwards: what
    // it reads outside of pieces it must hold by value, or `quiesce` comes before that is changed.
    // Throws std::bad_alloc.
    void run(Work work);

    // Waits until no member is in the work of a run that has returned.
    void quiesce();

  private:
    struct Run {
        Work work;
        std::uint32_t first_phase;
    };

    // The next piece of the phase; -1 where all are claimed, or the phase is over.
    int claim(std::uint32_t phase, int num_pieces);
    void complete(std::uint32_t phase, int num_pieces);
    void tell_of_end();
    void await_end(std::uint32_t phase);
    std::uint32_t current_phase() const { return static_cast<std::uint32_t>(state_.load() >> 32); }
    void serve(int index);
    void stop();
    bool was_forked() const;

    // What threads wait for and own. A forked process must neither use nor destroy it.
    struct Crew {
        std::mutex mutex;
        std::condition_variable idle;
        std::vector<std::thread> threads;
    };

    const int num_threads_;
    const pid_t home_;  // the process that has the threads
    // Each on a cache line of its own: they are written by all members.
    alignas(64) std::atomic<std::uint64_t> state_{0};  // the phase, and below it the next piece to be claimed
    alignas(64) std::atomic<int> num_done_{0};         // pieces of the phase
    alignas(64) std::atomic<std::uint32_t> num_ends_{0};
    alignas(64) std::atomic<std::uint32_t> num_runs_{0};

    std::unique_ptr<Crew> crew_;
    std::shared_ptr<const Run> run_;  // guarded by the mutex of the crew, as what follows
    int num_active_ = 0;              // members in the work of a run, the caller not counted
    bool stopping_ = false;
};

}  // namespace quire
