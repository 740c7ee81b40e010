// Prepares memory of every size and place, with pauses and without. Prints each failure and exits with 1 if there
// was any.
#include "quire/memory_preparer.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "testing.h"

namespace {

using quire::MemoryPreparer;
using quire::MemoryRange;
using quire::testing::expect;

constexpr std::size_t kPage = 4096, kPiece = std::size_t{2} << 20;

// Memory that the system has not allocated yet.
class Mapping {
  public:
    explicit Mapping(std::size_t num_bytes)
        : num_bytes_(num_bytes),
          data_(static_cast<std::byte*>(
              mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
    ~Mapping() { munmap(data_, num_bytes_); }

    std::byte* data() const { return data_; }

    std::size_t num_resident_pages() const {
        std::vector<unsigned char> pages(num_bytes_ / kPage);
        mincore(data_, num_bytes_, pages.data());
        std::size_t count = 0;
        for (const unsigned char page : pages) count += page & 1;
        return count;
    }

  private:
    std::size_t num_bytes_;
    std::byte* data_;
};

void await_end(const MemoryPreparer& preparer) {
    while (preparer.num_left() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

bool system_prepares() {
    const Mapping mapping(kPage);
    return madvise(mapping.data(), kPage, 23) == 0;  // MADV_POPULATE_WRITE
}

void test_every_range_is_taken() {
    const Mapping first(3 * kPiece), second(kPage), third(kPiece);
    first.data()[kPiece] = std::byte{7};
    MemoryPreparer preparer;
    preparer.start({{first.data() + 100, 3 * kPiece - 200}, {second.data() + 5, 1}, {third.data(), 0}});
    await_end(preparer);
    expect(first.num_resident_pages() == 3 * kPiece / kPage, "%zu pages of the first", first.num_resident_pages());
    expect(second.num_resident_pages() == 1, "the second range was not taken");
    expect(third.num_resident_pages() == 0, "a range without a byte was taken");
    for (std::size_t i = 0; i < 3 * kPiece; i += kPage) {
        const int byte = static_cast<int>(first.data()[i]), expected = i == kPiece ? 7 : 0;
        expect(byte == expected, "byte %zu is %d after it was prepared", i, byte);
    }
}

void test_no_piece_begins_in_a_pause() {
    const Mapping mapping(8 * kPiece);
    MemoryPreparer preparer;
    {
        const MemoryPreparer::Pause outer(preparer);
        {
            const MemoryPreparer::Pause inner(preparer);
        }
        preparer.start({{mapping.data(), 8 * kPiece}});
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        expect(mapping.num_resident_pages() == 0, "memory was taken in a pause");
    }
    await_end(preparer);
    expect(mapping.num_resident_pages() == 8 * kPiece / kPage, "memory was not taken after a pause");
}

void test_another_start_ends_the_first() {
    const Mapping first(kPiece), second(kPiece);
    MemoryPreparer preparer;
    {
        const MemoryPreparer::Pause pause(preparer);
        preparer.start({{first.data(), kPiece}});
        preparer.start({{second.data(), kPiece}});
    }
    await_end(preparer);
    expect(first.num_resident_pages() == 0, "an earlier range was taken");
    expect(second.num_resident_pages() == kPiece / kPage, "the later range was not taken");
}

void test_memory_that_was_freed() {
    MemoryPreparer preparer;
    MemoryRange range;
    {
        const MemoryPreparer::Pause pause(preparer);
        const Mapping mapping(4 * kPiece);
        range = {mapping.data(), 4 * kPiece};
        preparer.start({range});
    }
    await_end(preparer);
}

// A forked process has no thread to wait for.
void test_fork() {
    const Mapping mapping(kPiece);
    auto preparer = std::make_unique<MemoryPreparer>();
    const MemoryPreparer::Pause pause(*preparer);
    preparer->start({{mapping.data(), kPiece}});
    const pid_t child = fork();
    if (child == 0) {
        preparer->start({});
        await_end(*preparer);
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the forked process ended with status %d", status);
}

}  // namespace

int main() {
    if (system_prepares()) {
        test_every_range_is_taken();
        test_no_piece_begins_in_a_pause();
        test_another_start_ends_the_first();
    }
    test_memory_that_was_freed();
    test_fork();
    return quire::testing::exit_status();
}
