package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/drill"
	drillkit "github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/halt"
)

// drillOptions are the flags of `drill run`.
type drillOptions struct {
	all, controls, production, verbose bool
	dir, nodesDir                      string
	meshes, runs                       int
}

// newDrillCommand returns the commands that list and run rows of the failure matrix.
func newDrillCommand(program *kit.Program) *cobra.Command {
	return needs(&cobra.Command{
		Use: "drill", Short: "Break a mesh on purpose and measure how it is seen and how it recovers", GroupID: groupMesh,
	}, "list or run", newDrillListCommand(program), newDrillRunCommand(program), newDrillReapCommand())
}

// newDrillReapCommand returns the command that cleans up after a drill that died before its own cleanup.
func newDrillReapCommand() *cobra.Command {
	return &cobra.Command{
		Use: "reap DIR", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			signal.Ignore(os.Interrupt) // Ctrl-C is for the drill, which ends and thereby ends this process
			return mesh.Reap(cmd.Context(), cmd.InOrStdin(), args[0])
		},
	}
}

func newDrillListCommand(program *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "list", Short: "List the drills with their budgets and what they do", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var items []listedDrill
			for _, d := range drill.Drills() {
				items = append(items, row(d))
			}
			return kit.Records(program, cmd, func(d listedDrill) string { return d.Name }, drillListColumns, items)
		},
	}
}

// listedDrill is a line of `drill list`: a drill with its production budgets.
type listedDrill struct {
	Row                    int                `json:"row"`
	Name                   string             `json:"name"`
	Severity               string             `json:"severity"`
	Reason                 string             `json:"reason"`
	UserState              string             `json:"user_state"`
	Owner                  string             `json:"owner"`
	DetectionBudgetSeconds float64            `json:"detection_budget_seconds"`
	DetectionBudgetKey     string             `json:"detection_budget_key"` // a policy key whose value is added
	RecoveryBudgetSeconds  float64            `json:"recovery_budget_seconds"`
	Recovery               string             `json:"recovery"`
	Context                bool               `json:"context"` // whether it can be run with --context
	Injects                string             `json:"injects"`
	Sees                   string             `json:"sees"`
	Recovers               string             `json:"recovers"`
	Needs                  string             `json:"needs"`
	Controls               []drillkit.Control `json:"controls"`
	Mutation               string             `json:"mutation"`
}

func row(d drillkit.Drill) listedDrill {
	b := d.Budget()
	return listedDrill{
		Row: b.Row, Name: d.Name, Severity: b.Severity.String(), Reason: d.Expect.Reason, UserState: d.Expect.UserState,
		Owner: d.Expect.Owner, DetectionBudgetSeconds: b.Detect.Seconds(), DetectionBudgetKey: b.DetectKey,
		RecoveryBudgetSeconds: b.RecoverWithin().Seconds(), Recovery: string(b.Recovery), Context: d.Outside,
		Injects: d.Injects, Sees: d.Sees, Recovers: d.Recovers, Needs: d.Needs,
		Controls: drillkit.Controls(), Mutation: d.Mutation,
	}
}

var drillListColumns = []kit.Column[listedDrill]{
	{Title: "ROW", Drop: 5, Value: func(d listedDrill) string { return strconv.Itoa(d.Row) }},
	{Title: "NAME", Value: func(d listedDrill) string { return d.Name }},
	{Title: "SEVERITY", Value: func(d listedDrill) string { return d.Severity }},
	{Title: "DETECT", Drop: 2, Value: func(d listedDrill) string {
		return human.OnlyIf(d.DetectionBudgetKey != "", d.DetectionBudgetKey+" + ") + seconds(d.DetectionBudgetSeconds)
	}},
	{Title: "RECOVER", Drop: 3, Value: func(d listedDrill) string { return seconds(d.RecoveryBudgetSeconds) }},
	{Title: "REASON", Drop: 1, Value: func(d listedDrill) string { return d.Reason }},
	{
		Title: "WITH --context", Drop: 4,
		Value: func(d listedDrill) string { return human.YesNo(d.Context) },
	},
	{Title: "INJECTS", Wide: true, Value: func(d listedDrill) string { return d.Injects }},
}

func newDrillRunCommand(program *kit.Program) *cobra.Command {
	var o drillOptions
	cmd := &cobra.Command{
		Use: "run NAME...|--all", Short: "Run drills and judge them by their budgets",
		Long: "run starts a mesh of separate processes, injects real faults, and holds what the API reports and how long " +
			"recovery takes to the budgets.\n" +
			"The mesh ends with it. All drills run on three meshes at a time.\n" +
			"With --context it runs on the mesh of that context, limited to what can be injected through its API; the others " +
			"are refused.\n" +
			"A drill that fails or misses a budget ends with exit code 7. Without --production-timers the mesh has short " +
			"policy values and the budgets are scaled.",
		Example: "  gpuaas drill run saga-step-wedged\n  gpuaas drill run --all --controls -o json",
		RunE:    func(cmd *cobra.Command, args []string) error { return runDrills(cmd, program, o, args) },
		ValidArgsFunction: func(_ *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return kit.TextsOf(drill.Drills(), func(d drillkit.Drill) string { return d.Name }),
				cobra.ShellCompDirectiveNoFileComp
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.all, "all", false, "every drill, in the order of the matrix")
	f.BoolVar(&o.controls, "controls", false, "run both controls of each drill too: they must fail, and pass if they do")
	f.BoolVar(&o.production, "production-timers", false, "with the policy values and the budgets of production")
	f.BoolVarP(&o.verbose, "verbose", "v", false, "log on stderr what is done, and what the parts of the mesh log")
	f.IntVar(&o.meshes, "meshes", 0, "how many meshes of their own run drills at a time (default: 3 with --all, else 1)")
	f.IntVar(&o.runs, "runs", 1,
		"how often each drill runs: then the slowest detection may take half the budget (`detection_p95_seconds`)")
	f.StringVar(&o.dir, "data-dir", "",
		"directory of the drills' own mesh, which is kept (default: a temporary one, removed)")
	f.StringVar(&o.nodesDir, "nodes-dir", "",
		"write what 'gpuaas nodes get' shows of the nodes of each fault, once its verdict is there, into this `directory`, "+
			"a file a drill")
	return cmd
}

// chosen returns the drills that a command line names.
func (o drillOptions) chosen(names []string) ([]drillkit.Drill, error) {
	switch {
	case o.all && len(names) > 0:
		return nil, errors.New("--all and names exclude each other")
	case o.all:
		return drill.Drills(), nil
	case len(names) == 0:
		return nil, errors.New("name drills, or ask for --all; `gpuaas drill list` shows them")
	}
	return drill.Find(names...)
}

func runDrills(cmd *cobra.Command, program *kit.Program, o drillOptions, names []string) error {
	drills, err := o.chosen(names)
	if err != nil {
		return exit.Usage(err)
	}
	if program.Named() && (o.production || o.dir != "") {
		return exit.Usage(errors.New("--production-timers and --data-dir are for a mesh of the drills' own: a mesh with a " +
			"context runs with its own policy"))
	}
	if o.dir, err = absolute(o.dir); err != nil {
		return exit.Usage(err)
	}
	if o.runs < 1 {
		return exit.Usage(errors.New("--runs is a number above zero"))
	}
	if o.meshes, err = o.beside(program.Named(), len(drills)); err != nil {
		return exit.Usage(err)
	}
	level := slog.LevelError
	if o.verbose {
		level = slog.LevelInfo
	}
	logger := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: level}))
	ctx, release := app.WithSignals(cmd.Context(), logger, halt.Force(o.dir))
	defer release()
	targets, err := drillMeshes(ctx, cmd, program, o, logger, drills)
	ended := func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		return closeMeshes(ctx, targets)
	}
	if err != nil {
		return errors.Join(err, ended())
	}
	forgetDead(logger) // starting a mesh removed the directories of dead ones
	var unwritten error
	show := func(r drillkit.Result) {
		unwritten = errors.Join(unwritten, writeNodes(o.nodesDir, r))
		if !program.JSON() {
			fmt.Fprintf(cmd.ErrOrStderr(), "%s %s after %.1f s %s\n", map[bool]string{true: "passed", false: "FAILED"}[r.Passed],
				r.Name, r.ElapsedSeconds, r.Why)
		}
	}
	var controls []drillkit.Control
	if o.controls {
		controls = drillkit.Controls()
	}
	results, err := drillkit.Beside(ctx, targets, repeated(drills, o.runs),
		drillkit.Options{Logger: logger, Controls: controls, Each: show})
	err = errors.Join(err, ended(), unwritten)
	if printErr := kit.Records(program, cmd, func(r drillkit.Result) string { return r.Name }, drillColumns,
		results); printErr != nil {
		return errors.Join(err, printErr)
	}
	if err != nil {
		return err
	}
	for _, r := range results {
		if !r.Passed {
			return exit.OverBudget("drill "+r.Name+" failed: "+r.Why,
				"look at the stage that failed; `gpuaas drill run -v` tells each step")
		}
	}
	if o.runs > 1 {
		return checkSlowest(cmd.ErrOrStderr(), results, o.runs)
	}
	return nil
}

// beside returns on how many meshes drills run at a time.
func (o drillOptions) beside(named bool, drills int) (int, error) {
	switch single := named || o.dir != ""; {
	case o.meshes < 0:
		return 0, errors.New("--meshes is a number above zero")
	case single && o.meshes > 1:
		return 0, errors.New("--meshes is for meshes of the drills' own in temporary directories: without --context and " +
			"--data-dir")
	case single, o.meshes == 0 && !o.all:
		return 1, nil
	}
	return min(cmp.Or(o.meshes, meshesOfAll), drills), nil
}

// meshesOfAll is on how many meshes all drills run at a time: they wait for most of their time.
const meshesOfAll = 3

// closeMeshes ends meshes, each beside the others.
func closeMeshes(ctx context.Context, meshes []*mesh.Mesh) error {
	failed := make([]error, len(meshes))
	var closing sync.WaitGroup
	for i, m := range meshes {
		closing.Go(func() { failed[i] = m.Close(ctx) })
	}
	closing.Wait()
	return errors.Join(failed...)
}

// drillMeshes returns the mesh of the context if the command line names one, else new meshes for the drills: those that
// stand, also beside an error.
func drillMeshes(ctx context.Context, cmd *cobra.Command, program *kit.Program, o drillOptions, logger *slog.Logger,
	drills []drillkit.Drill,
) ([]*mesh.Mesh, error) {
	if program.Named() {
		person, err := program.Person(cmd)
		if err != nil {
			return nil, err
		}
		target := mesh.On(person)
		var refused []error
		for _, d := range drills {
			refused = append(refused, d.Refuse(target))
		}
		if err := errors.Join(refused...); err != nil {
			return nil, exit.Usage(err)
		}
		return []*mesh.Mesh{target}, nil
	}
	var unable []error
	for _, d := range drills {
		unable = append(unable, d.Able())
	}
	if err := errors.Join(unable...); err != nil {
		return nil, exit.Usage(err)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find own program: %w", err)
	}
	if _, err := agents.Find(filepath.Join(filepath.Dir(self), agents.Program)); err != nil {
		return nil, fmt.Errorf("the node agent stands beside this program in a drill: %w", err)
	}
	var out []*mesh.Mesh
	for range o.meshes {
		m, err := mesh.Start(ctx, logger, mesh.Config{
			Programs: filepath.Dir(self), CacheDir: dev.CacheDir(), Dir: o.dir, Production: o.production, LogLevel: "info",
			Reaper: func(dir string) *exec.Cmd {
				//nolint:noctx // this very program, which outlives us on purpose
				return exec.Command(self, "drill", "reap", dir)
			},
		})
		if err != nil {
			return out, err
		}
		out = append(out, m)
	}
	return out, nil
}

func seconds(s float64) string { return strconv.FormatFloat(s, 'f', -1, 64) + "s" }

var drillColumns = []kit.Column[drillkit.Result]{
	{Title: "NAME", Value: func(r drillkit.Result) string { return r.Name }},
	{Title: "SEVERITY", Drop: 3, Value: func(r drillkit.Result) string { return r.Severity }},
	{Title: "PASSED", Value: func(r drillkit.Result) string { return human.YesNo(r.Passed) }},
	{Title: "INJECTED", Drop: 6, Value: func(r drillkit.Result) string { return human.YesNo(r.Injected) }},
	{Title: "REASON", Drop: 4, Value: func(r drillkit.Result) string { return r.Reason }},
	{Title: "USER STATE", Drop: 5, Value: func(r drillkit.Result) string { return r.UserState }},
	{Title: "DETECTED", Drop: 1, Value: func(r drillkit.Result) string {
		return seconds(r.DetectedSeconds) + " of " + seconds(r.DetectionBudgetSeconds)
	}},
	{Title: "RECOVERED", Drop: 2, Value: func(r drillkit.Result) string {
		return seconds(r.RecoveredSeconds) + " of " + seconds(r.RecoveryBudgetSeconds)
	}},
	{Title: "EVIDENCE", Wide: true, Value: func(r drillkit.Result) string { return strings.Join(r.EvidenceIDs, " ") }},
	{Title: "WHY", Text: true, Value: func(r drillkit.Result) string { return r.Why }},
}
