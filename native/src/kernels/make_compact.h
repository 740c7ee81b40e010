// Makes the chunks of compact matrices (compact.h).
#pragma once

#include <bit>

#include "compact.h"

#if defined(__AVX2__)

namespace quire::QUIRE_ISA {

// The lowest of the 15 adjacent exponents that most numbers have, counted in every fourth record.
inline int lowest_exponent(const std::uint16_t* numbers, int num_records) {
    constexpr int kEach = 4, kExponents = 256, kAdjacent = CompactHead::kCodes - 1;
    int counts[kExponents] = {};
    for (int record = 0; record < num_records; record += kEach) {
        for (int i = 0; i < kRecordNumbers; ++i) ++counts[numbers[record * kRecordNumbers + i] >> 7 & 255];
    }
    int best = 1, most = 0, sum = 0;
    for (int last = 1; last < kExponents; ++last) {
        sum += counts[last] - (last > kAdjacent ? counts[last - kAdjacent] : 0);
        if (sum <= most) continue;
        most = sum;
        best = last < kAdjacent ? 1 : last - kAdjacent + 1;
    }
    return best;
}

// Writes a record; `exceptions` has a bit for each number, in the order of bytes of the record.
inline void put_record(const std::uint16_t* numbers, int lowest, std::byte* record, std::uint64_t (&exceptions)[2]) {
    Bytes codes = {};
    for (int i = 0; i < 2; ++i) {
        const auto first = (Halves)load_register(numbers + 2 * i * kRegisterNumbers);
        const auto second = (Halves)load_register(numbers + (2 * i + 1) * kRegisterNumbers);
        const auto upper = (Bytes)QUIRE_ON_REGISTER(packus_epi16)((Register)(first >> 8), (Register)(second >> 8));
        const auto lower = (Bytes)QUIRE_ON_REGISTER(packus_epi16)((Register)(first & 255), (Register)(second & 255));
        const Bytes exponents = upper << 1 | lower >> 7, code = exponents - static_cast<std::uint8_t>(lowest - 1);
        const auto has_code = (Bytes)(exponents > 0) & (Bytes)(code > 0) & (Bytes)(code < CompactHead::kCodes);
        const auto fits = has_code | (Bytes)(exponents == 0);
        codes |= (code & has_code) << (i == 0 ? 0 : 4);
        const Bytes rest = ((upper & 0x80) | (lower & 0x7f)) & fits;
        std::memcpy(record + (i + 1) * sizeof rest, &rest, sizeof rest);
#if defined(__AVX512BF16__)
        exceptions[i] = ~_mm512_movepi8_mask((Register)fits);
#else
        exceptions[i] = static_cast<std::uint32_t>(~_mm256_movemask_epi8((Register)fits));
#endif
    }
    std::memcpy(record, &codes, sizeof codes);
}

// Writes a chunk from the numbers of its records. False: there are too many exceptions.
inline bool put_chunk(const std::uint16_t* numbers, int num_records, std::byte* chunk) {
    CompactHead head = {};
    const int lowest = lowest_exponent(numbers, num_records);
    for (int code = 1; code < CompactHead::kCodes; ++code) {
        const int exponent = lowest + code - 1;
        head.upper[code] = static_cast<std::uint8_t>(exponent >> 1 & 0x7f);
        head.lower[code] = static_cast<std::uint8_t>((exponent & 1) << 7);
    }
    for (int record = 0; record < num_records; ++record) {
        const int first = record * kRecordNumbers;
        std::uint64_t exceptions[2];
        put_record(numbers + first, lowest, chunk + sizeof head + record * kRecordBytes, exceptions);
        for (int which = 0; which < 2; ++which) {
            for (std::uint64_t left = exceptions[which]; left != 0; left &= left - 1) {
                if (head.num_exceptions == CompactHead::kMostExceptions) return false;
                const int place = first + number_of_byte(which, std::countr_zero(left));
                head.exceptions[head.num_exceptions++] = {static_cast<std::uint16_t>(place), numbers[place]};
            }
        }
    }
    std::memcpy(chunk, &head, sizeof head);
    return true;
}

}  // namespace quire::QUIRE_ISA

#endif  // __AVX2__
