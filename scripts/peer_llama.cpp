// Times steps of llama.cpp: MODEL THREADS CONTEXT STEPS BATCHES PROMPT; batches with commas, 0 for none of either.
//
// A line each, medians in milliseconds: `decode BATCH MEDIAN` over STEPS steps on top of CONTEXT positions, `prefill 1 MEDIAN` over five prompts.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

namespace {

double median_ms(int times, const std::function<void()>& run) {
    std::vector<double> taken;
    for (int i = 0; i < times; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        run();
        taken.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    }
    std::sort(taken.begin(), taken.end());
    return taken[taken.size() / 2];
}

void decode(llama_context* context, llama_batch& batch) {
    if (llama_decode(context, batch) != 0) std::exit(2);
    llama_synchronize(context);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 7) return std::fprintf(stderr, "usage: %s MODEL THREADS CONTEXT STEPS BATCHES PROMPT\n", argv[0]), 2;
    const int threads = std::atoi(argv[2]), depth = std::atoi(argv[3]), steps = std::atoi(argv[4]), prompt = std::atoi(argv[6]);
    llama_log_set([](ggml_log_level level, const char* text, void*) { if (level >= GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr); }, nullptr);
    llama_backend_init();
    llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return 1;
    std::mt19937 random(1);
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const auto token = [&] { return (llama_token)(random() % vocabulary); };
    const auto open = [&](int sequences, int positions) {
        auto parameters = llama_context_default_params();
        parameters.n_ctx = positions * sequences;
        parameters.n_batch = parameters.n_ubatch = 2048;
        parameters.n_seq_max = sequences;
        parameters.n_threads = parameters.n_threads_batch = threads;
        parameters.kv_unified = false;
        llama_context* context = llama_init_from_model(model, parameters);
        if (!context) std::exit(1);
        return context;
    };
    // `count` tokens of a sequence from a position on, the last with logits.
    const auto fill = [&](llama_context* context, int sequence, int count) {
        llama_batch batch = llama_batch_init(count, 0, 1);
        batch.n_tokens = count;
        for (int i = 0; i < count; ++i) {
            batch.token[i] = token(), batch.pos[i] = i, batch.n_seq_id[i] = 1, batch.seq_id[i][0] = sequence;
            batch.logits[i] = i + 1 == count;
        }
        decode(context, batch);
        llama_batch_free(batch);
    };
    std::stringstream batches(argv[5]);
    for (std::string word; std::getline(batches, word, ',');) {
        const int count = std::atoi(word.c_str());
        if (count == 0) continue;
        llama_context* context = open(count, depth + steps + 16);
        for (int sequence = 0; sequence < count; ++sequence) fill(context, sequence, depth);
        llama_batch batch = llama_batch_init(count, 0, 1);
        int at = depth;
        const double median = median_ms(steps, [&] {
            batch.n_tokens = count;
            for (int i = 0; i < count; ++i) {
                batch.token[i] = token(), batch.pos[i] = at, batch.n_seq_id[i] = 1, batch.seq_id[i][0] = i, batch.logits[i] = 1;
            }
            decode(context, batch);
            ++at;
        });
        std::printf("decode %d %.4f\n", count, median);
        std::fflush(stdout);
        llama_batch_free(batch);
        llama_free(context);
    }
    if (prompt > 0) {
        llama_context* context = open(1, prompt + 16);
        std::printf("prefill 1 %.4f\n", median_ms(5, [&] {
                        llama_memory_clear(llama_get_memory(context), true);
                        fill(context, 0, prompt);
                    }));
        llama_free(context);
    }
}
