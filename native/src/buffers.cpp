#include "quire/buffers.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quire {

void* allocate_aligned(std::size_t num_bytes) {
    constexpr std::size_t kCacheLine = 64, kHugePage = std::size_t{2} << 20;
    const std::size_t alignment = num_bytes < kHugePage ? kCacheLine : kHugePage;
    void* memory = std::aligned_alloc(alignment, (num_bytes + alignment - 1) / alignment * alignment);
    if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    // Only advice: without huge pages everything works, with more TLB misses.
    if (alignment == kHugePage) madvise(memory, num_bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

std::byte* Arena::take(std::size_t num_bytes) {
    constexpr std::size_t kCacheLine = 64;
    const std::size_t wanted = (num_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    if (pieces_.empty() || pieces_.back().size() - used_ < wanted) {
        pieces_.emplace_back(std::max(wanted, kPieceBytes));
        used_ = 0;
    }
    used_ += wanted;
    return pieces_.back().data() + used_ - wanted;
}

}  // namespace quire
