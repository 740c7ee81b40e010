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

std::uint64_t start_of(std::uint32_t phase) { return static_cast<std::uint64_t>(phase) << 32; }

}  // namespace

ThreadTeam::ThreadTeam(int num_threads) : num_threads_(num_threads), home_(getpid()), crew_(std::make_unique<Crew>()) {
    crew_->threads.reserve(num_threads - 1);
    try {
        for (int index = 1; index < num_threads; ++index) {
            crew_->threads.emplace_back([this, index] { serve(index); });
        }
    } catch (...) {
        stop();  // the threads that did start wait for a run that will never come
        throw;
    }
}

ThreadTeam::~ThreadTeam() {
    if (was_forked()) {
        // Threads that do not exist here may have held the lock or waited for the condition.
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

int ThreadTeam::claim(std::uint32_t phase, int num_pieces) {
    std::uint64_t state = state_.load(std::memory_order_acquire);
    while (static_cast<std::uint32_t>(state >> 32) == phase) {
        const int piece = static_cast<int>(static_cast<std::uint32_t>(state));
        if (num_pieces == 0) {
            // No piece will be completed, so the first member to arrive ends the phase.
            if (state_.compare_exchange_weak(state, start_of(phase + 1), std::memory_order_acq_rel)) tell_of_end();
        } else if (piece >= num_pieces) {
            return -1;
        } else if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
            return piece;
        }
    }
    return -1;
}

void ThreadTeam::complete(std::uint32_t phase, int num_pieces) {
    if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_pieces) return;
    num_done_.store(0, std::memory_order_relaxed);
    state_.store(start_of(phase + 1), std::memory_order_release);
    tell_of_end();
}

void ThreadTeam::tell_of_end() {
    num_ends_.fetch_add(1, std::memory_order_release);
    num_ends_.notify_all();
}

void ThreadTeam::await_end(std::uint32_t phase) {
    for (;;) {
        // Read before the phase: if the phase ends in between, this number has changed.
        const std::uint32_t num_ends = num_ends_.load(std::memory_order_acquire);
        if (current_phase() != phase) return;
        await_change(num_ends_, num_ends);
    }
}

}  // namespace quire
