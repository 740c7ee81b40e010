// A team of threads that computes a step together.
//
//     run ──► every member: for_pieces ─► for_pieces ─► … ──► run returns when the last phase is done
//                           phase p       phase p + 1
//
// Each member has a share of the pieces of a phase, the same share in every phase of equal size: neighbouring weights
// stay with one core. A member that has finished its share claims pieces of other shares. A phase ends when all of its
// *pieces* are done, not when all members have arrived. So a member that loses its core delays only its current piece,
// if any. The others continue with the next phases and runs without it. When it returns, it skips the phases that it
// missed. Which member computes a piece never changes a result.
//
//     share 0: pieces 0 1 2    member 0   ├ 0 ┼ 1 ┼ 2 ┼ 5 ┤ phase p + 1: ├ 0 ┼ …
//     share 1: pieces 3 4 5    member 1   ├ 3   ┼ 4   ┤ no core ………………………………………………┤ skips p + 1
//
// No counter is written by all members for each piece: a share has its own counter, on its own cache line. The counter
// of the phase is written once per eight shares.
//
// A waiting member spins for some microseconds, about as long as a phase, and then sleeps, so that it
// takes no core from others while the engine is idle or the machine oversubscribed.
//
// A forked process has a copy of the team without its threads, which may have been in the middle of a
// run. There nothing waits for them: `quiesce` and the destructor return at once.
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

        // From 0 to size - 1: an index for the member's scratch memory.
        int index() const { return index_; }

        // Calls work(piece) for the pieces 0 … num_pieces - 1, spread over the team; returns when
        // all of them are done. Every member must call it for the same phases in the same order. A member that
        // calls it after the phase has ended may pass another number of pieces.
        template <typename Work>
        void for_pieces(int num_pieces, Work work) {
            if (team_.begin(phase_, num_pieces)) {
                const int num_shares = team_.num_shares(num_pieces);
                for (int turn = 0; turn < num_shares; ++turn) {
                    const int share = (index_ + turn) % num_shares;
                    for (int piece; (piece = team_.claim(share, phase_, num_pieces)) >= 0;) {
                        work(piece);
                        team_.complete(share, phase_, num_pieces);
                    }
                }
                team_.await_end(phase_);
            }
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

    // The thread that calls `run` is one of the members. Throws std::system_error if a thread cannot be
    // started.
    explicit ThreadTeam(int num_threads);
    ~ThreadTeam();
    ThreadTeam(const ThreadTeam&) = delete;
    ThreadTeam& operator=(const ThreadTeam&) = delete;

    int size() const { return num_threads_; }

    // Members run `work`, which must not throw; returns when its phases are done. One caller at a
    // time. A late member may still be skipping the phases of `work` afterwards. So `work` must hold by
    // value all data that it reads outside of pieces, or the caller must call `quiesce` before changing
    // such data. Throws std::bad_alloc.
    void run(Work work);

    // Waits until no member still executes the work of a run that has returned.
    void quiesce();

  private:
    struct Run {
        Work work;
        std::uint32_t first_phase;
    };

    // The pieces of a member.
    struct alignas(64) Share {
        std::atomic<std::uint64_t> claimed{0};  // the phase of the last claim (upper half), and its next piece
        std::atomic<int> num_done{0};           // pieces of the phase
    };
    // The progress of a phase is counted over some shares first, then over all.
    static constexpr int kSharesOfGroup = 8;
    struct alignas(64) Group {
        std::atomic<int> num_done{0};  // shares of the phase
    };

    // Whether the phase is running; ends it if it has no pieces. `num_pieces` is reliable only in the running phase.
    bool begin(std::uint32_t phase, int num_pieces);
    // The number of shares with pieces; the first ones can have one more than the others.
    int num_shares(int num_pieces) const { return num_pieces < num_threads_ ? num_pieces : num_threads_; }
    int first_piece(int share, int num_pieces) const;
    // The next piece of a share; -1 if all are claimed or the phase is over.
    int claim(int share, std::uint32_t phase, int num_pieces);
    void complete(int share, std::uint32_t phase, int num_pieces);
    void end(std::uint32_t phase);
    void await_end(std::uint32_t phase);
    std::uint32_t current_phase() const { return phase_.load(std::memory_order_acquire); }
    void serve(int index);
    void stop();
    bool was_forked() const;

    // The threads, and the condition that they wait for. A forked process must neither use nor destroy the crew.
    struct Crew {
        std::mutex mutex;
        std::condition_variable idle;
        std::vector<std::thread> threads;
    };

    const int num_threads_;
    const pid_t home_;  // the process that has the threads
    std::vector<Share> shares_;
    std::vector<Group> groups_;
    // Each on its own cache line, because all members read or write them.
    alignas(64) std::atomic<std::uint32_t> phase_{1};
    alignas(64) std::atomic<int> num_groups_done_{0};
    alignas(64) std::atomic<std::uint32_t> num_runs_{0};

    std::unique_ptr<Crew> crew_;
    // Guarded by the mutex of the crew, as are the two below.
    std::shared_ptr<const Run> run_;
    int num_active_ = 0;  // members in the work of a run, without the caller
    bool stopping_ = false;
};

}  // namespace quire
