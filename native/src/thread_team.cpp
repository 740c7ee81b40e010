#include "quire/thread_team.h"

#include <unistd.h>

#include <utility>

namespace quire {
namespace {

constexpr int kNumSpins = 2000;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void await_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
    for (int spin = 0; spin < kNumSpins; ++spin) {
        if (value.load(std::memory_order_acquire) != old) return;
        relax();
    }
    value.wait(old, std::memory_order_acquire);
}

std::uint64_t claim_of(std::uint32_t phase, int next) { return static_cast<std::uint64_t>(phase) << 32 | next; }

}  // namespace

ThreadTeam::ThreadTeam(int num_threads)
    : num_threads_(num_threads),
      home_(getpid()),
      shares_(num_threads),
      groups_((num_threads + kSharesOfGroup - 1) / kSharesOfGroup),
      crew_(std::make_unique<Crew>()) {
    crew_->threads.reserve(num_threads - 1);
    try {
        for (int index = 1; index < num_threads; ++index) {
            crew_->threads.emplace_back([this, index] { serve(index); });
        }
    } catch (...) {
        stop();  // the threads that have started wait for a run that will not happen
        throw;
    }
}

ThreadTeam::~ThreadTeam() {
    if (was_forked()) {
        // Threads that do not exist in this process may have held the lock or waited for the condition.
        static_cast<void>(crew_.release());
    } else {
        stop();
    }
}

bool ThreadTeam::was_forked() const { return getpid() != home_; }

void ThreadTeam::stop() {
    {
        const std::lock_guard<std::mutex> guard(crew_->mutex);
        stopping_ = true;
    }
    num_runs_.fetch_add(1, std::memory_order_release);
    num_runs_.notify_all();
    for (std::thread& thread : crew_->threads) thread.join();
}

void ThreadTeam::run(Work work) {
    const auto run = std::make_shared<const Run>(Run{std::move(work), current_phase()});
    if (num_threads_ > 1) {
        {
            const std::lock_guard<std::mutex> guard(crew_->mutex);
            run_ = run;
        }
        num_runs_.fetch_add(1, std::memory_order_release);
        num_runs_.notify_all();
    }
    Member member(*this, 0, run->first_phase);
    run->work(member);
    const std::lock_guard<std::mutex> guard(crew_->mutex);
    run_.reset();
}

void ThreadTeam::quiesce() {
    if (was_forked()) return;
    std::unique_lock<std::mutex> guard(crew_->mutex);
    crew_->idle.wait(guard, [this] { return num_active_ == 0; });
}

void ThreadTeam::serve(int index) {
    for (std::uint32_t seen = 0;;) {
        await_change(num_runs_, seen);
        seen = num_runs_.load(std::memory_order_acquire);
        std::shared_ptr<const Run> run;
        {
            const std::lock_guard<std::mutex> guard(crew_->mutex);
            if (stopping_) return;
            if (run_ == nullptr) continue;  // it was over before this member woke up
            run = run_;
            ++num_active_;
        }
        Member member(*this, index, run->first_phase);
        run->work(member);
        run.reset();
        const std::lock_guard<std::mutex> guard(crew_->mutex);
        if (--num_active_ == 0) crew_->idle.notify_all();
    }
}

bool ThreadTeam::begin(std::uint32_t phase, int num_pieces) {
    if (num_pieces == 0) end(phase);  // the first member to arrive ends it
    return current_phase() == phase;
}

int ThreadTeam::first_piece(int share, int num_pieces) const {
    const int each = num_pieces / num_threads_, more = num_pieces % num_threads_;
    return share * each + (share < more ? share : more);
}

int ThreadTeam::claim(int share, std::uint32_t phase, int num_pieces) {
    const int end = first_piece(share + 1, num_pieces);
    std::atomic<std::uint64_t>& claimed = shares_[share].claimed;
    std::uint64_t last = claimed.load(std::memory_order_acquire);
    for (;;) {
        const bool begun = static_cast<std::uint32_t>(last >> 32) == phase;
        // If the phase ends after this, all of the share has been claimed, and the exchange fails.
        if (!begun && current_phase() != phase) return -1;
        const int piece = begun ? static_cast<int>(static_cast<std::uint32_t>(last)) : first_piece(share, num_pieces);
        if (piece >= end) return -1;
        if (claimed.compare_exchange_weak(last, claim_of(phase, piece + 1), std::memory_order_acq_rel)) return piece;
    }
}

void ThreadTeam::complete(int share, std::uint32_t phase, int num_pieces) {
    // The member that completes a counter resets it to zero, before the phase ends.
    const auto count = [](std::atomic<int>& counter, int all) {
        if (counter.fetch_add(1, std::memory_order_acq_rel) + 1 < all) return false;
        counter.store(0, std::memory_order_relaxed);
        return true;
    };
    if (!count(shares_[share].num_done, first_piece(share + 1, num_pieces) - first_piece(share, num_pieces))) return;
    const int group = share / kSharesOfGroup, shares_after = num_shares(num_pieces) - group * kSharesOfGroup;
    if (!count(groups_[group].num_done, shares_after < kSharesOfGroup ? shares_after : kSharesOfGroup)) return;
    if (count(num_groups_done_, (num_shares(num_pieces) + kSharesOfGroup - 1) / kSharesOfGroup)) end(phase);
}

void ThreadTeam::end(std::uint32_t phase) {
    if (phase_.compare_exchange_strong(phase, phase + 1, std::memory_order_acq_rel)) phase_.notify_all();
}

void ThreadTeam::await_end(std::uint32_t phase) {
    while (current_phase() == phase) await_change(phase_, phase);
}

}  // namespace quire
