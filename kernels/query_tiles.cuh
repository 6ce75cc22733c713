// Tiles of queries of several sequences, one behind another.
//
//   first(s) = floor((queries before s + s * (QUERIES - 1)) / QUERIES)
//
// The tiles of a sequence begin there: with n queries it has ceil(n / QUERIES) of them, and floor(a + b) >= floor(a) + floor(b) leaves room for as many. So
// their places follow from last_rows alone, and a grid of first(sequences) tiles, which depends on the numbers of rows and sequences, takes any mixture of
// long and short ones: at most (QUERIES - 1) / QUERIES of a tile for each sequence is without queries.
#pragma once

#include "device.cuh"

struct QueryTile {
    // Of the sequence that has it: its first row, of those of the launch, and its queries.
    int first_row, queries;
    // Of its own queries the first of the tile; queries or more where the tile has none.
    int first_query;
};

// A tile of sequences whose last rows are last_rows, behind so many rows of the step that are another launch's; each row has `per_row` queries. The search is
// a few loads of words that all blocks share.
template <int QUERIES>
__device__ inline QueryTile query_tile(const unsigned* last_rows, int rows_before, int sequences, int per_row, int tile) {
    const auto row_of = [&](int sequence) { return sequence > 0 ? (int)last_rows[sequence - 1] + 1 - rows_before : 0; };
    const auto first_of = [&](int sequence) { return (row_of(sequence) * per_row + sequence * (QUERIES - 1)) / QUERIES; };
    int own = 0, behind = sequences;
    while (behind - own > 1) {
        const int middle = (own + behind) / 2;
        if (first_of(middle) <= tile) own = middle;
        else behind = middle;
    }
    const int begin = row_of(own);
    return {begin, (row_of(own + 1) - begin) * per_row, (tile - first_of(own)) * QUERIES};
}
