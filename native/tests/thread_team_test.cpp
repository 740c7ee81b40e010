// Runs teams of 1 to 4 threads through thousands of phases. Pieces leave marks in plain integers, so that the
// thread sanitizer also sees two members that write one, and a read before the end of its phase. Prints
// each failure and exits with 1 if there was any.
#include "quire/thread_team.h"

#include <sys/wait.h>
#include <unistd.h>

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

// The number of pieces of a phase: none, one, fewer and more than the threads.
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
                // Every member sees all marks of the others.
                int wrong = 0;
                for (int piece = 0; piece < kMostPieces; ++piece) wrong += marks[piece] != (piece < num_pieces);
                num_wrong += wrong;
            }
        });
        team.quiesce();
        expect(num_wrong == 0, "%d threads, run %d: %d pieces not done exactly once", num_threads, run,
               num_wrong.load());
    }
}

void test_many_runs(int num_threads) {
    constexpr int kNumRuns = 1000;
    ThreadTeam team(num_threads);
    std::vector<int> done(7, 0);
    for (int run = 0; run < kNumRuns; ++run) {
        team.run([&](ThreadTeam::Member& member) { member.for_pieces(7, [&](int piece) { ++done[piece]; }); });
    }
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
            member.for_pieces(3, [&](int) { num_wrong += count != phase; });
        }
    });
    team.quiesce();
    expect(num_wrong == 0 && count == kNumPhases, "%d threads: once was %d times of %d", num_threads, count,
           kNumPhases);
}

// A member that stops in a piece delays the others, and no mark is lost.
void test_slow_pieces(int num_threads) {
    constexpr int kNumPhases = 12, kNumPieces = 20;
    ThreadTeam team(num_threads);
    std::vector<std::vector<int>> done(kNumPhases, std::vector<int>(kNumPieces, 0));
    team.run([&](ThreadTeam::Member& member) {
        for (int phase = 0; phase < kNumPhases; ++phase) {
            member.for_pieces(kNumPieces, [&](int piece) {
                if (piece == phase || piece == kNumPieces - 1) pause_for(1000);
                ++done[phase][piece];
            });
        }
    });
    for (const std::vector<int>& phase : done) {
        for (const int count : phase)
            expect(count == 1, "%d threads: a slow piece was done %d times", num_threads, count);
    }
}

// A member that stops between pieces delays no other member. Here it stops until all runs are over. Then it skips the
// phases that it missed, and takes part again.
void test_absent_member(int num_threads) {
    constexpr int kNumRuns = 30, kNumPhases = 20;
    ThreadTeam team(num_threads);
    for (int absent = 1; absent < num_threads; ++absent) {
        std::atomic<bool> all_runs_over{false};
        std::atomic<int> num_done{0};
        const auto work = [&](ThreadTeam::Member& member) {
            for (int phase = 0; phase < kNumPhases; ++phase) {
                if (member.index() == absent && phase == kNumPhases / 2) {
                    while (!all_runs_over) pause_for(100);
                }
                member.for_pieces(5, [&](int) { ++num_done; });
            }
        };
        for (int run = 0; run < kNumRuns; ++run) team.run(work);
        expect(num_done == kNumRuns * kNumPhases * 5, "%d threads, one absent: %d pieces", num_threads,
               num_done.load());
        all_runs_over = true;
        team.run(work);
        team.quiesce();
        expect(num_done == (kNumRuns + 1) * kNumPhases * 5, "%d threads, one back: %d pieces", num_threads,
               num_done.load());
    }
}

// Members sleep between runs, and the next run wakes them: two pieces that wait for each other need two members.
void test_sleep_between_runs(int num_threads) {
    ThreadTeam team(num_threads);
    for (int run = 0; run < 15; ++run) {
        pause_for(run % 3 * 2000);
        std::atomic<int> num_there{0};
        team.run([&](ThreadTeam::Member& member) {
            member.for_pieces(num_threads, [&](int) {
                ++num_there;
                while (num_there < num_threads) std::this_thread::yield();
            });
        });
        team.quiesce();
        expect(num_there == num_threads, "%d threads: %d came after sleep", num_threads, num_there.load());
    }
}

void test_destruction(int num_threads) {
    for (int round = 0; round < 20; ++round) {
        const auto team = std::make_unique<ThreadTeam>(num_threads);
        // Never used, just used, or asleep.
        if (round % 3 > 0) team->run([](ThreadTeam::Member& member) { member.for_pieces(3, [](int) {}); });
        if (round % 3 > 1) pause_for(1500);
    }
}

// Two teams share nothing, like those of two engines in one process.
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
    one.quiesce();
    other.quiesce();
    expect(count == 200 && other_count == 200, "two teams side by side: %d and %d runs", count, other_count);
}

// A process that is forked during a run has none of the other members, and waits for none.
void test_fork(int num_threads) {
    constexpr int kPatienceS = 60;
    std::atomic<bool> may_leave{false};
    auto team = std::make_unique<ThreadTeam>(num_threads);
    std::atomic<int> num_there{0};
    team->run([&](ThreadTeam::Member& member) {
        member.for_pieces(num_threads, [&](int) {
            ++num_there;
            while (num_there < num_threads) std::this_thread::yield();
        });
        while (member.index() > 0 && !may_leave) std::this_thread::yield();
    });
    const pid_t child = fork();
    if (child == 0) {
        alarm(kPatienceS);
        team->quiesce();
        team.reset();
        _exit(0);
    }
    int status = 0;
    const bool waited = child > 0 && waitpid(child, &status, 0) == child;
    expect(waited && WIFEXITED(status) && WEXITSTATUS(status) == 0, "%d threads: the forked process waits",
           num_threads);
    may_leave = true;
    team->quiesce();
}

}  // namespace

int main() {
    for (int num_threads = 1; num_threads <= 4; ++num_threads) {
        test_every_piece_once(num_threads);
        test_many_runs(num_threads);
        test_once(num_threads);
        test_slow_pieces(num_threads);
        test_absent_member(num_threads);
        test_sleep_between_runs(num_threads);
        test_destruction(num_threads);
        test_fork(num_threads);
    }
    test_two_teams();
    return quire::testing::exit_status();
}
