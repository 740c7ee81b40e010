// Parts of a step timed by themselves, and the limits of the machine beside them: what
// `quire bench kernels`, `quire bench latency` and `quire doctor` measure. No engine needs any of it.
//
// Every function returns the seconds of each repetition, or a rate; the team does the work as it
// does in a step. What is read should not fit into the caches, unless that is what is measured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quire/kernels.h"
#include "quire/thread_team.h"

namespace quire {

// Reads the memory once a pass, with the widest loads of the machine.
std::vector<double> time_reading(ThreadTeam& team, const std::byte* data, std::size_t num_bytes, int num_passes);

// Additions and multiplications per second of the arithmetic that a set of kernels is made of, all
// members at once, on registers alone; about `seconds` long. 0 where the name is not known here.
double arithmetic_rate(const char* set_name, ThreadTeam& team, double seconds);

// Products of `num_rows` rows, one matrix after another and again from the first, as a step cuts
// them into pieces. The matrices have one shape.
std::vector<double> time_products(const Kernels& kernels, ThreadTeam& team, const std::vector<MatrixView>& matrices,
                                  const Rows& input, const Rows& output, int num_rows, int num_calls);

// Sequences that decode: the newest token of each attends to all of its own.
struct DecodingSequences {
    const std::int64_t* block_tables = nullptr;  // [num_sequences, table_stride]
    std::int64_t table_stride = 0;
    const std::int64_t* lengths = nullptr;  // [num_sequences], the newest token counted
    int num_sequences = 0;
    int num_heads = 0;
};

// Attention of a step of decodes over the layers, all of them in each pass. Throws std::bad_alloc.
std::vector<double> time_attention(const Kernels& kernels, ThreadTeam& team, const std::vector<PagedKv>& layers,
                                   const DecodingSequences& sequences, int num_passes);

}  // namespace quire
