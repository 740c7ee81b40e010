// Sends teams of 1 to 4 threads through thousands of phases. The marks that pieces leave are plain
// integers: that no two members write one, and that each is read only after the barrier, is also for
// the thread sanitizer to see. Prints each failure and exits with 1 if there was any.
#include "quire/thread_team.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "testing.h"

namespace {

using quire::ThreadTeam;
using quire::testing::expect;

void pause_for(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// How many pieces a phase has: none, one, fewer and more than there are threads.
int pieces_of_phase(int phase) {
    constexpr int kPieces[] = {0, 1, 2, 3, 4, 5, 0, 0, 17, 100};
    return kPieces[phase % 10];
}

void test_every_piece_once(int num_threads) {
    constexpr int kNumRuns = 12, kNumPhases = 100, kMostPieces = 100;
    ThreadTeam team(num_threads);
    expect(team.size() == num_threads, "a team of %d has %d members", num_threads, team.size());
    for (int run = 0; run < kNumRuns; ++run) {
        std::vector<std::vector<int>> done(kNumPhases, std::vector<int>(kMostPieces, 0));
        std::atomic<int> num_wrong{0};
        team.run([&](ThreadTeam::Member& member) {
            for (int phase = 0; phase < kNumPhases; ++phase) {
                std::vector<int>& marks = done[phase];
                const int num_pieces = pieces_of_phase(phase);
                member.for_pieces(num_pieces, [&](int piece) { ++marks[piece]; });
                // Every member sees all that the others have done.
                int wrong = 0;
                for (int piece = 0; piece < kMostPieces; ++piece) wrong += marks[piece] != (piece < num_pieces);
                num_wrong += wrong;
            }
        });
        expect(num_wrong == 0, "%d threads, run %d: %d pieces not done exactly once", num_threads, run,
               num_wrong.load());
    }
}

void test_many_runs(int num_threads) {
    constexpr int kNumRuns = 1000;
    ThreadTeam team(num_threads);
    std::vector<int> visits(num_threads, 0), done(7, 0);
    for (int run = 0; run < kNumRuns; ++run) {
        team.run([&](ThreadTeam::Member& member) {
            ++visits[member.index()];
            member.for_pieces(7, [&](int piece) { ++done[piece]; });
        });
    }
    for (const int count : visits) expect(count == kNumRuns, "%d threads: a member ran %d times", num_threads, count);
    for (const int count : done) expect(count == kNumRuns, "%d threads: a piece was done %d times", num_threads, count);
}

void test_once(int num_threads) {
    constexpr int kNumPhases = 200;
    ThreadTeam team(num_threads);
    int count = 0;
    std::atomic<int> num_wrong{0};
    team.run([&](ThreadTeam::Member& member) {
        for (int phase = 1; phase <= kNumPhases; ++phase) {
            member.once([&] { ++count; });
            num_wrong += count != phase;
            member.barrier();  // before the next one changes it
        }
    });
    expect(num_wrong == 0 && count == kNumPhases, "%d threads: once was %d times of %d", num_threads, count,
           kNumPhases);
}

// A member that stands still, in a piece or before a phase, holds the others up and loses nothing.
void test_slow_member(int num_threads) {
    constexpr int kNumPhases = 12, kNumPieces = 20;
    ThreadTeam team(num_threads);
    for (int slow = 0; slow < num_threads; ++slow) {
        std::vector<std::vector<int>> done(kNumPhases, std::vector<int>(kNumPieces, 0));
        std::atomic<int> num_wrong{0};
        team.run([&](ThreadTeam::Member& member) {
            for (int phase = 0; phase < kNumPhases; ++phase) {
                if (member.index() == slow && phase % 3 == 0) pause_for(1000);
                member.for_pieces(kNumPieces, [&](int piece) {
                    if (piece == phase) pause_for(500);
                    ++done[phase][piece];
                });
                for (const int count : done[phase]) num_wrong += count != 1;
            }
        });
        expect(num_wrong == 0, "%d threads, member %d is slow: %d pieces not done exactly once", num_threads, slow,
               num_wrong.load());
    }
}

// Between runs the members fall asleep; the next run wakes all of them, and the caller does not return
// before they are through.
void test_sleep_between_runs(int num_threads) {
    constexpr int kNumRuns = 15;
    ThreadTeam team(num_threads);
    for (int run = 0; run < kNumRuns; ++run) {
        pause_for(run % 3 * 2000);
        std::vector<int> visits(num_threads, 0);
        team.run([&](ThreadTeam::Member& member) {
            if (member.index() == run % num_threads) pause_for(300);
            ++visits[member.index()];
        });
        for (const int count : visits) expect(count == 1, "%d threads: run %d after sleep", num_threads, run);
    }
}

void test_destruction(int num_threads) {
    for (int round = 0; round < 20; ++round) {
        const auto team = std::make_unique<ThreadTeam>(num_threads);
        // Never used, just used, or asleep.
        if (round % 3 > 0) team->run([](ThreadTeam::Member& member) { member.barrier(); });
        if (round % 3 > 1) pause_for(1500);
    }
}

// Two teams side by side, as two engines of one process have them, share nothing.
void test_two_teams() {
    ThreadTeam one(2), other(2);
    int count = 0, other_count = 0;
    std::thread beside([&] {
        for (int run = 0; run < 200; ++run) {
            other.run([&](ThreadTeam::Member& member) { member.once([&] { ++other_count; }); });
        }
    });
    for (int run = 0; run < 200; ++run) {
        one.run([&](ThreadTeam::Member& member) { member.once([&] { ++count; }); });
    }
    beside.join();
    expect(count == 200 && other_count == 200, "two teams side by side: %d and %d runs", count, other_count);
}

}  // namespace

int main() {
    for (int num_threads = 1; num_threads <= 4; ++num_threads) {
        test_every_piece_once(num_threads);
        test_many_runs(num_threads);
        test_once(num_threads);
        test_slow_member(num_threads);
        test_sleep_between_runs(num_threads);
        test_destruction(num_threads);
    }
    test_two_teams();
    return quire::testing::exit_status();
}
