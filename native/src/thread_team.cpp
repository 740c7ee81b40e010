#include "quire/thread_team.h"

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

}  // namespace

ThreadTeam::ThreadTeam(int num_threads) : num_threads_(num_threads) {
    threads_.reserve(num_threads - 1);
    try {
        for (int index = 1; index < num_threads; ++index) threads_.emplace_back([this, index] { serve(index); });
    } catch (...) {
        stop();  // those that started wait for a run that will never come
        throw;
    }
}

ThreadTeam::~ThreadTeam() { stop(); }

void ThreadTeam::stop() {
    stopping_ = true;
    num_runs_.fetch_add(1, std::memory_order_release);
    num_runs_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadTeam::run(const std::function<void(Member&)>& work) {
    work_ = &work;
    num_runs_.fetch_add(1, std::memory_order_release);
    num_runs_.notify_all();
    Member member(*this, 0);
    work(member);
    barrier();
}

void ThreadTeam::serve(int index) {
    Member member(*this, index);
    for (std::uint32_t seen = 0;; ++seen) {
        await_change(num_runs_, seen);
        if (stopping_) return;
        (*work_)(member);
        barrier();
    }
}

void ThreadTeam::barrier() {
    const std::uint32_t before = num_barriers_.load(std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads_) {
        await_change(num_barriers_, before);
        return;
    }
    // The last to arrive: nobody else is between two barriers now.
    num_arrived_.store(0, std::memory_order_relaxed);
    next_piece_.store(0, std::memory_order_relaxed);
    num_barriers_.fetch_add(1, std::memory_order_release);
    num_barriers_.notify_all();
}

void ThreadTeam::await_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
    for (int spin = 0; spin < kNumSpins; ++spin) {
        if (value.load(std::memory_order_acquire) != old) return;
        relax();
    }
    value.wait(old, std::memory_order_acquire);
}

}  // namespace quire
