package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/mesh/halt"
)

// benchOptions are the flags of the benches.
type benchOptions struct {
	program   *kit.Program
	logger    *slog.Logger
	version   string // of this build
	agents    int
	minutes   int
	table     io.Writer // where a bench prints its tables before the result
	nodes     int
	rounds    int // of `bench fence` and `bench reconnect`
	replicas  int // of each service
	spaces    int
	instances int
	history   bool
	profile   string
	lives     int
	clients   int
	schemas   int
	days      int // of history
	cache     string
	sweeps    bool // check the first sweeps of a fleet
	ended     int  // workspaces that have ended before
	alone     bool // the bench has no database
	verbose   bool
}

// newBenchCommand returns the command that measures this build on this machine.
func newBenchCommand(program *kit.Program) *cobra.Command {
	o := benchOptions{program: program}
	o.version, _ = obs.Build()
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure this build against raw baselines on this machine", GroupID: groupMesh, Args: noArgs,
		Long: "Each bench measures its raw baseline in the same run and prints both in absolutes, with the environment " +
			"and the ratio.\n" +
			"It starts a Postgres of its own, with fsync on. A ratio that misses what is required ends with exit code 7.",
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().BoolVarP(&o.verbose, "verbose", "v", false, "log what the measured parts log")
	add := func(use, short string, agents int, which ...bencher) *cobra.Command {
		sub := &cobra.Command{
			Use: use, Short: short, Args: noArgs,
			RunE: func(cmd *cobra.Command, _ []string) error { return runBenches(cmd, o, which) },
		}
		if agents > 0 {
			sub.Flags().IntVar(&o.agents, "agents", agents, "how many agents")
		}
		sub.PreRun = func(cmd *cobra.Command, _ []string) {
			if cmd.Flags().Lookup("agents") == nil {
				o.agents = 0
			}
		}
		cmd.AddCommand(sub)
		return sub
	}
	add("streams", "Server memory of each connected, heartbeating agent", 5000, benchStreams)
	add("tasks", "Durable round trips of tasks per second", 200, benchTasks)
	runs := add("sagas", "Runs of six no-op steps per second", 0, benchSagas)
	runs.Long = "With --finished, the processor time and the log of a run on a database without a history " +
		"and on one in which so many workspaces have\n" +
		"ended, each recreated once, over 30 days: in turn, and neither with a history may be more than 1.05 of that without."
	runs.Flags().IntVar(&o.ended, "finished", 0, "compare with a database in which so many workspaces have ended")
	runs.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.alone = o.ended != 0; o.alone {
			return runBenches(cmd, o, []bencher{benchFinished})
		}
		return runBenches(cmd, o, []bencher{benchSagas})
	}
	add("join", "Time until a request that joins a recreation is answered, with Redis and without", 0, benchJoin,
		benchJoinAlone)
	add("cancel", "Time until a cancel reaches the running step, with notifications and by heartbeats alone", 0,
		benchCancel, benchCancelAlone)
	add("resume", "How long an operation pauses when the process that drives it is killed", 0, benchResume)
	quiet := add("idle", "What a mesh costs in which nothing happens", 0, benchIdle)
	alone := func(*cobra.Command, []string) { o.agents, o.alone = 0, true }
	quiet.PreRun = alone
	quiet.Flags().IntVar(&o.minutes, "minutes", 2, "how long to measure, after a minute of rest")
	fences := add("fence", "Time from a decision about a node to its closed session, and from its reactivation to "+
		"the next", 0, benchFence)
	fences.Long = "Holds, quarantines and fences the nodes of a mesh in turn and reactivates them, each at moments of " +
		"its own.\n" +
		"At p99 a session is to be closed 2 s after the decision, the next one admitted 12 s after the reactivation, and " +
		"a task whose hint was lost\n" +
		"to have ended 12 s after it was queued."
	fences.PreRun = alone
	fences.Flags().IntVar(&o.nodes, "nodes", 8, "how many nodes")
	fences.Flags().IntVar(&o.rounds, "rounds", 3, "how often each node is held, quarantined and fenced")
	breaks := add("disconnect", "Time until the API shows a node as disconnected after its stream broke", 0,
		benchDisconnect)
	breaks.Long = "Kills the agents of a mesh of separate processes, each at moments of its own, and asks the API " +
		"every 5 ms\n" +
		"until it shows the node as disconnected: at most 0.5 s at p50, and 3 s at p99."
	breaks.PreRun = alone
	breaks.Flags().IntVar(&o.nodes, "nodes", 8, "how many nodes")
	breaks.Flags().IntVar(&o.rounds, "rounds", 25, "how often the stream of each node is broken")
	breaks.Flags().IntVar(&o.replicas, "replicas", 2, "replicas of each service")
	returns := add("reconnect", "Time until all agents are back after the replicas of the node API were killed", 5000,
		benchReconnect)
	returns.Long = "Kills all replicas of the node API of a mesh of separate processes, starts them again, and measures " +
		"from the first one that accepts\n" +
		"until all agents are admitted: at most twice what bare mutual-TLS handshakes of as many clients take, whose " +
		"servers are killed in the\n" +
		"same way and stay away for as long. No node may be called down or held for it, by the API, after the time in " +
		"which one would be.\n" +
		"Agents and bare clients wait before each try for a random part of 1 s, then of 2 s, 4 s and so on up to 30 s, " +
		"as the product's agents\n" +
		"do, so most of both times is this wait: `last_dial_s` is how long it lasted, `open_ms` what an opening took " +
		"without it."
	returns.PreRun = func(*cobra.Command, []string) { o.alone = true }
	returns.Flags().IntVar(&o.replicas, "replicas", 2, "replicas of each service, and bare servers")
	returns.Flags().IntVar(&o.rounds, "rounds", 3, "how often the replicas are killed; each takes two minutes at least")
	peers := add("peers", "Sagas beside DBOS Transact and tasks beside River, on the same Postgres", 0)
	var only string
	peers.Flags().StringVar(&only, "only", "", "measure sagas or tasks alone")
	peers.RunE = func(cmd *cobra.Command, _ []string) error {
		which, ok := map[string][]bencher{
			"": {benchBesideDBOS, benchBesideRiver}, "sagas": {benchBesideDBOS},
			"tasks": {benchBesideRiver},
		}[only]
		if !ok {
			return exit.Usage(errors.New("--only is sagas or tasks"))
		}
		return runBenches(cmd, o, which)
	}
	large := add("fleet", "Rows, buffers and time of every statement on fleets of three sizes", 0, benchFleet)
	large.Long = "Copies the rows of one machine and one workspace that a mesh has written, for a tenth, three tenths " +
		"and all of the fleet, and runs every\n" +
		"statement of the services on each. The table on stderr says what each costs on the largest one, and how that " +
		"grew: x 1 is as the fleet."
	large.PreRun = alone
	large.Flags().IntVar(&o.nodes, "nodes", 1000, "machines of the largest fleet")
	large.Flags().IntVar(&o.spaces, "workspaces", 10000, "workspaces of the largest fleet")
	large.Flags().IntVar(&o.instances, "boxes", 0,
		"instances of the largest fleet, launched for a workspace each, in place of machines with slots")
	large.MarkFlagsMutuallyExclusive("boxes", "nodes")
	large.MarkFlagsMutuallyExclusive("boxes", "workspaces")
	large.Flags().BoolVar(&o.history, "history", false, "load the events of all workspaces as well")
	large.Flags().IntVar(&o.days, "history-days", 0,
		"load workspaces that have ended within so many days as well: 1 % of the fleet a day, with their events")
	large.Flags().BoolVar(&o.sweeps, "sweeps", false,
		"start services on the largest fleet instead, and check that their sweeps find nothing and no brake engages, for "+
			"some three minutes")
	large.Flags().StringVar(&o.cache, "cache", "",
		"keep the loaded databases in this directory, and take what this build has left there within 20 hours")
	large.MarkFlagsMutuallyExclusive("sweeps", "cache")
	large.MarkFlagsMutuallyExclusive("sweeps", "history")
	large.MarkFlagsMutuallyExclusive("sweeps", "history-days")
	pages := add("list", "Lists of workspaces per second at the API, over 50 connections", 0, benchList)
	pages.PreRun = alone
	pages.Flags().IntVar(&o.nodes, "nodes", 100, "machines of the fleet")
	pages.Flags().IntVar(&o.spaces, "workspaces", 1000, "workspaces of the fleet")
	pages.Flags().StringVar(&o.profile, "profile", "",
		"write a processor profile of the services and the client to this file")
	tenants := add("schemas", "What one more schema and role of a workspace cost where there are many", 0, benchSchemas)
	tenants.Long = "Makes schemas with their login roles as provisioning does, and measures at a hundredth, a tenth " +
		"and all of them what one more costs to make, to\n" +
		"log in to and to drop, and what it takes to read the names of all."
	tenants.Flags().IntVar(&o.schemas, "schemas", 10000, "schemas of the largest database")
	whole := add("lives", "What a workspace leaves in the database after its terms", 0, benchLives)
	whole.Long = "Creates, recreates and decommissions workspaces in a mesh whose terms are a minute, waits until " +
		"retention has cut what it cuts, and\n" +
		"reads what is left. The table on stderr says what each table keeps of one life, indexes included; all may " +
		"keep 40 KB."
	whole.PreRun = alone
	whole.Flags().IntVar(&o.lives, "lives", 1000, "how many workspaces live")
	whole.Flags().IntVar(&o.clients, "clients", 4, "how many of them at once")
	soak := add("soak", "Whether database and processes stay as large as they are, hour after hour", 0, benchSoak)
	soak.Long = "Creates, recreates and decommissions a workspace every 6 s, in a mesh whose terms are a minute. " +
		"Every 15 s it reads the sizes of the\n" +
		"database and the logs of the mesh, and the memory of the mesh, an agent and Postgres. " +
		"From minute 15 on, or from a third of a shorter run, a line is\n" +
		"laid through each of them: over the rest of the run it may rise by 1 % of the mean."
	soak.PreRun = alone
	soak.Flags().IntVar(&o.minutes, "minutes", 45, "how long")
	soak.Flags().IntVar(&o.clients, "clients", 4, "how many workspaces at once; one that finds no place is left out")
	add("all", "Run all benches, one after the other", 0, benchSagas, benchJoin, benchJoinAlone, benchCancel,
		benchCancelAlone, benchResume, benchTasks, benchStreams)
	child := &cobra.Command{
		Use: "child KIND", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return runBenchChild(cmd, args[0]) },
	}
	cmd.AddCommand(child)
	for _, sub := range cmd.Commands() {
		prepare := sub.PreRun
		sub.PreRunE = func(cmd *cobra.Command, args []string) error {
			if prepare != nil {
				prepare(cmd, args)
			}
			return takeDefaults(cmd)
		}
	}
	return cmd
}

// takeDefaults sets the flags of a command that are not given to their defaults. Until then an option that several
// benches share has the default of the bench whose flag was defined last.
func takeDefaults(cmd *cobra.Command) error {
	var errs []error
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if !f.Changed {
			errs = append(errs, f.Value.Set(f.DefValue))
		}
	})
	return errors.Join(errs...)
}

// checkNumbers returns an error for a number on the command line with which a bench measures nothing. Zero is allowed
// for --finished and --history-days, whose default it is.
func checkNumbers(cmd *cobra.Command) error {
	var errs []error
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Value.Type() != "int" {
			return
		}
		least := 1
		if f.Name == "finished" || f.Name == "history-days" {
			least = 0
		}
		if n, err := strconv.Atoi(f.Value.String()); err == nil && n < least {
			errs = append(errs, fmt.Errorf("--%s is %d, and has to be %d or more", f.Name, n, least))
		}
	})
	return exit.Usage(errors.Join(errs...))
}

func runBenches(cmd *cobra.Command, o benchOptions, which []bencher) error {
	if err := checkNumbers(cmd); err != nil {
		return err
	}
	level := slog.LevelError
	if o.verbose {
		level = slog.LevelInfo
	}
	o.logger = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level}))
	o.table = cmd.ErrOrStderr()
	ctx, release := app.WithSignals(cmd.Context(), o.logger, halt.Force())
	defer release()
	halt.Sweep(ctx, o.logger)
	forgetDead(o.logger)
	passed := true
	for _, b := range which {
		r, err := oneBench(ctx, o, b)
		if err != nil {
			return err
		}
		write := r.WriteText
		if o.program.JSON() {
			write = r.WriteJSON
		}
		if err := write(cmd.OutOrStdout()); err != nil {
			return err
		}
		passed = passed && r.Passed
	}
	if !passed {
		return exit.OverBudget("a bench missed what is required of it", "measure on a machine that does nothing else")
	}
	return nil
}

// oneBench runs a bench on its own database, so that the rows of another bench do not slow it down.
func oneBench(ctx context.Context, o benchOptions, b bencher) (bench.Result, error) {
	if o.alone {
		return b(ctx, o, nil)
	}
	db, err := bench.StartDatabase(ctx, o.logger)
	if err != nil {
		return bench.Result{}, fmt.Errorf("start the bench's database: %w", err)
	}
	r, err := b(ctx, o, db)
	return r, errors.Join(err, db.Close()) //nolint:contextcheck // what was started is ended though the caller gave up
}
