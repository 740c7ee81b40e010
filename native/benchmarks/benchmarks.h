// Times single parts of a step, and measures the limits of the machine, for `quire bench kernels`, `quire bench
// latency` and `quire doctor`. No engine needs this.
//
// Every function returns the seconds of each repetition, or a rate. The team does the work as in a step. The
// data should not fit into the caches, unless a caller wants to measure the caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quire/kernels.h"
#include "quire/thread_team.h"

namespace quire {

// Reads the memory once per pass, with the machine's widest loads.
std::vector<double> time_reading(ThreadTeam& team, const std::byte* data, std::size_t num_bytes, int num_passes);

// The additions and multiplications per second that all members reach together, on registers only, with the
// instructions of a set of kernels. Takes about `seconds`. 0 if the name is unknown here.
double arithmetic_rate(const char* set_name, ThreadTeam& team, double seconds);

// Products of `num_rows` rows with each matrix in turn, repeatedly, cut into pieces as in a
// step. The matrices have one shape.
std::vector<double> time_products(const Kernels& kernels, ThreadTeam& team, const std::vector<MatrixView>& matrices,
                                  const Rows& input, const Rows& output, int num_rows, int num_calls);

// Sequences in a step: the newest tokens of each attend to the tokens up to their own.
struct AttendingSequences {
    const std::int64_t* block_tables = nullptr;  // [num_sequences, table_stride]
    std::int64_t table_stride = 0;
    const std::int64_t* lengths = nullptr;  // [num_sequences], including the newest tokens
    int num_sequences = 0;
    int num_queries = 1;  // the newest tokens of each
    int num_heads = 0;
};

// The attention of all layers in a step, once per pass. Throws std::bad_alloc.
std::vector<double> time_attention(const Kernels& kernels, ThreadTeam& team, const std::vector<PagedKv>& layers,
                                   const AttendingSequences& sequences, int num_passes);

}  // namespace quire
