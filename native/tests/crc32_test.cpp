// Tests the checksum: known values, the fast computation against the plain one, and bytes in pieces.
#include "quire/crc32.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "testing.h"

namespace {

using quire::testing::expect;

void test_known_checksums() {
    const std::string digits = "123456789";
    expect(quire::crc32(digits.data(), digits.size()) == 0xCBF43926, "the check value of the standard");
    expect(quire::crc32(nullptr, 0) == 0, "of nothing");
    const std::vector<unsigned char> zeros(4096);
    expect(quire::crc32(zeros.data(), zeros.size()) == 0xC71C0011, "of a page of zeros");
}

void test_both_ways_agree() {
    std::mt19937 random(1);
    std::vector<unsigned char> data(2000);
    for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
    for (std::size_t size = 0; size <= 300; ++size) {
        for (const std::size_t start : {0, 1, 7}) {
            const auto before = static_cast<std::uint32_t>(random());
            const unsigned char* from = data.data() + start;
            expect(quire::crc32(from, size, before) == quire::plain_crc32(from, size, before), "%zu bytes from %zu",
                   size, start);
        }
    }
}

void test_pieces() {
    std::mt19937 random(2);
    std::vector<unsigned char> data(5000);
    for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
    const std::uint32_t whole = quire::plain_crc32(data.data(), data.size());
    for (int i = 0; i < 100; ++i) {
        const std::size_t cut = random() % (data.size() + 1);
        const std::uint32_t first = quire::crc32(data.data(), cut);
        expect(quire::crc32(data.data() + cut, data.size() - cut, first) == whole, "cut at %zu", cut);
    }
}

}  // namespace

int main() {
    test_known_checksums();
    test_both_ways_agree();
    test_pieces();
    return quire::testing::exit_status();
}
