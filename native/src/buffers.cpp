#include "quire/buffers.h"

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

}  // namespace quire
