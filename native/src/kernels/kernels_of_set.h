// The kernels of one instruction set; each kernel file defines some of them, in its own namespace. Sets that differ
// only in products share the other kernels: those are in the namespace QUIRE_REST, of one of these sets. Products with
// codes are in QUIRE_CODED, because sets that differ only in a matrix unit share them too.
#pragma once

#include "quire/kernels.h"

namespace quire::QUIRE_REST {

void activate(float* values, int count, Activation activation);
// values = activation(values) * ups, for a multiple of kPanelWidth numbers
void gate(float* values, const float* ups, int count, Activation activation);
void multiply_by_sigmoid(float* values, const float* gates, int count);
void normalize(const float* input, float* output, int size, const NormView& norm);
void rotate(float* head, const float* cosines, const float* sines, int half);
void soft_cap(float* values, int count, float cap);
void add(float* values, const float* others, int count);
void mix(float* const* rows, int num_rows, const float* weights, int size);
float mean(const float* values, int count);
float mean_square(const float* values, int count, float middle);
bool all_finite(const float* values, int count);

void write_kv(const PagedKv& kv, std::int64_t slot, int kv_head, const float* key, const float* value);
void attention(const AttentionTask& task, float* scratch);
void delta(const DeltaTask& task, int record, float* scratch);
void convolve(const ConvolutionTask& task, int chunk);

double exponentials(const float* logits, int count, float shift, float factor, float* weights);
void arg_max(const float* values, int count, float* value, int* index);
int next_contender(const float* logits, int first, int count, const RaceView& race);

}  // namespace quire::QUIRE_REST

namespace quire::QUIRE_CODED {

// Adds to `sums`, [rows of the block][four panels of the group][16], the products of rows with a coded matrix. `next`:
// the memory of the next block, to prefetch.
void add_coded_products(const MatrixView& matrix, const LinearInput& input, const LinearTile& block, const char* next,
                        float* sums);

}  // namespace quire::QUIRE_CODED

namespace quire::QUIRE_ISA {

using namespace QUIRE_REST;

std::size_t packed_bytes(const MatrixView& matrix);
bool pack_panels(const MatrixRows& rows, const MatrixView& matrix, StoredType as, void* panels, int first_panel,
                 int num_panels);
void unpack_row(const MatrixView& matrix, int row, float* output);
void round_row(const LinearInput& input, RowForms forms, int num_inputs, int row);
void linear(const MatrixView& matrix, const LinearInput& input, const Rows& output, const LinearTile& tile,
            bool accumulate);
void gated_linear(const MatrixView& gate, const MatrixView& up, const LinearInput& input, const Rows& output,
                  const LinearTile& tile, Activation activation);

const Kernels& kernels();

}  // namespace quire::QUIRE_ISA
