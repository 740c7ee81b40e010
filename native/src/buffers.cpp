#include "quire/buffers.h"

#include <algorithm>

namespace quire {

void* allocate_aligned(std::size_t num_bytes) {
    constexpr std::size_t kCacheLine = 64, kHugePage = std::size_t{2} << 20;
    const std::size_t alignment = num_bytes < kHugePage ? kCacheLine : kHugePage;
    void* memory = std::aligned_alloc(alignment, (num_bytes + alignment - 1) / alignment * alignment);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

std::byte* Arena::take(std::size_t num_bytes) {
    constexpr std::size_t kCacheLine = 64;
    const std::size_t wanted = (num_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    if (pieces_.empty() || pieces_.back().memory.size() - pieces_.back().num_used < wanted) {
        pieces_.push_back({Buffer<std::byte>(std::max(wanted, kPieceBytes)), 0});
    }
    Piece& piece = pieces_.back();
    piece.num_used += wanted;
    return piece.memory.data() + piece.num_used - wanted;
}

void Arena::give_back(const void* first) {
    Piece& piece = pieces_.back();
    piece.num_used = static_cast<const std::byte*>(first) - piece.memory.data();
    if (piece.num_used == 0) pieces_.pop_back();  // the next part may be too large for it
}

std::vector<MemoryRange> Arena::ranges() const {
    std::vector<MemoryRange> ranges;
    for (const Piece& piece : pieces_) ranges.push_back({piece.memory.data(), piece.num_used});
    return ranges;
}

}  // namespace quire
