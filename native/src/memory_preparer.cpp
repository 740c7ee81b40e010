#include "quire/memory_preparer.h"

#include <unistd.h>

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#endif

namespace quire {
namespace {

constexpr std::size_t kPieceBytes = std::size_t{2} << 20;  // a huge page
constexpr std::chrono::milliseconds kIdleTime{20};         // longer than the engine takes between two steps
constexpr std::chrono::milliseconds kLookInterval{5};

#if defined(__linux__)
// Values of Linux that older headers do not name.
constexpr int kPopulateWrite = 23, kCollapse = 25;

void yield_to_others() { setpriority(PRIO_PROCESS, gettid(), 19); }

// On a NUMA machine, spreads the memory that this thread allocates over all nodes: no thread owns keys and values.
// Weights have been allocated by the threads that multiply them.
void spread_over_nodes() {
    constexpr int kInterleave = 3, kAllowed = 4;  // MPOL_INTERLEAVE, MPOL_F_MEMS_ALLOWED
    unsigned long nodes[16] = {};
    constexpr unsigned long kNumBits = 8 * sizeof nodes;
    if (syscall(SYS_get_mempolicy, nullptr, nodes, kNumBits, nullptr, kAllowed) != 0) return;
    syscall(SYS_set_mempolicy, kInterleave, nodes, kNumBits);
}

// Returns false if the system does not do this.
bool prepare(const MemoryRange& piece) {
    const std::uintptr_t page = sysconf(_SC_PAGESIZE);
    const std::uintptr_t start = reinterpret_cast<std::uintptr_t>(piece.data) / page * page;
    const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(piece.data) + piece.num_bytes;
    void* const memory = reinterpret_cast<void*>(start);
    const std::size_t num_bytes = (end - start + page - 1) / page * page;
    const bool whole = start % kPieceBytes == 0 && num_bytes == kPieceBytes;
    if (whole) madvise(memory, num_bytes, MADV_HUGEPAGE);
    if (madvise(memory, num_bytes, kPopulateWrite) != 0) return false;
    if (whole) madvise(memory, num_bytes, kCollapse);
    return true;
}
#else
void yield_to_others() {}
void spread_over_nodes() {}
bool prepare(const MemoryRange&) { return false; }
#endif

// Cuts the ranges at the boundaries of huge pages.
std::vector<MemoryRange> pieces_of(const std::vector<MemoryRange>& ranges) {
    std::vector<std::vector<MemoryRange>> by_turn;
    for (const MemoryRange& range : ranges) {
        std::size_t turn = 0;
        for (std::size_t done = 0; done < range.num_bytes; ++turn) {
            const std::byte* data = range.data + done;
            const std::size_t to_next = kPieceBytes - reinterpret_cast<std::uintptr_t>(data) % kPieceBytes;
            const std::size_t count = std::min(to_next, range.num_bytes - done);
            if (turn == by_turn.size()) by_turn.emplace_back();
            by_turn[turn].push_back({data, count});
            done += count;
        }
    }
    std::vector<MemoryRange> pieces;
    for (const auto& turn : by_turn) pieces.insert(pieces.end(), turn.begin(), turn.end());
    return pieces;
}

}  // namespace

MemoryPreparer::MemoryPreparer() : home_(getpid()) {}

MemoryPreparer::~MemoryPreparer() { stop(); }

void MemoryPreparer::start(const std::vector<MemoryRange>& ranges) {
    stop();
    std::vector<MemoryRange> pieces = pieces_of(ranges);
    num_left_.store(pieces.size());
    last_end_.store(Clock::now().time_since_epoch().count());
    crew_ = std::make_unique<Crew>();
    crew_->thread = std::thread([this, crew = crew_.get(), pieces = std::move(pieces)] { work(*crew, pieces); });
}

void MemoryPreparer::stop() {
    if (crew_ == nullptr) return;
    if (getpid() != home_) {
        static_cast<void>(crew_.release());
        return;
    }
    {
        const std::lock_guard<std::mutex> guard(crew_->mutex);
        crew_->stopping = true;
    }
    crew_->stop_asked.notify_all();
    crew_->thread.join();
    crew_.reset();
}

void MemoryPreparer::work(Crew& crew, const std::vector<MemoryRange>& pieces) {
    yield_to_others();
    spread_over_nodes();
    for (const MemoryRange& piece : pieces) {
        {
            std::unique_lock<std::mutex> guard(crew.mutex);
            while (!crew.stopping && !idle()) crew.stop_asked.wait_for(guard, kLookInterval);
            if (crew.stopping) return;
        }
        if (!prepare(piece)) break;
        num_left_.fetch_sub(1, std::memory_order_release);
    }
    num_left_.store(0, std::memory_order_release);
}

bool MemoryPreparer::idle() const {
    const Clock::duration since = Clock::now().time_since_epoch() - Clock::duration(last_end_.load());
    return num_pauses_.load() == 0 && since >= kIdleTime;
}

MemoryPreparer::Pause::~Pause() {
    preparer_.last_end_.store(MemoryPreparer::Clock::now().time_since_epoch().count());
    preparer_.num_pauses_.fetch_sub(1);
}

}  // namespace quire
