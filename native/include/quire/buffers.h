// Memory of the engine: aligned to cache lines and allocated once, so that allocation can fail in one place only.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace quire {

// Memory that a MemoryPreparer can prepare.
struct MemoryRange {
    const std::byte* data;
    std::size_t num_bytes;
};

// Uninitialised memory for `T`, aligned to a cache line.
template <typename T>
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(std::size_t count) { allocate(count); }
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Buffer() { std::free(data_); }

    // Throws std::bad_alloc. The old contents are lost.
    void allocate(std::size_t count);
    T* data() const { return data_; }
    std::size_t size() const { return count_; }
    MemoryRange range() const { return {reinterpret_cast<const std::byte*>(data_), count_ * sizeof(T)}; }

  private:
    void swap(Buffer& other) {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
    }

    T* data_ = nullptr;
    std::size_t count_ = 0;
};

// Returns memory aligned to a cache line; memory of 2 MiB or more is aligned to 2 MiB, so that it can lie in huge
// pages. Throws std::bad_alloc. Free it with std::free.
void* allocate_aligned(std::size_t num_bytes);

// Memory that lives as long as the arena: cut from large pieces, so that small parts lie in huge pages too.
class Arena {
  public:
    // Returns uninitialised memory, aligned to a cache line. Throws std::bad_alloc.
    std::byte* take(std::size_t num_bytes);
    // Takes back what was taken last, which begins at `first`.
    void give_back(const void* first);

    // The memory allocated so far.
    std::vector<MemoryRange> ranges() const;

  private:
    // The part of a piece that is never used is never touched, so it takes no memory.
    static constexpr std::size_t kPieceBytes = std::size_t{64} << 20;

    struct Piece {
        Buffer<std::byte> memory;
        std::size_t num_used;
    };

    std::vector<Piece> pieces_;
};

template <typename T>
void Buffer<T>::allocate(std::size_t count) {
    std::free(data_);
    data_ = nullptr;
    count_ = 0;
    if (count == 0) return;
    data_ = static_cast<T*>(allocate_aligned(count * sizeof(T)));
    count_ = count;
}

}  // namespace quire
