package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/cluster"
	"github.com/gpuaas/mesh/mesh/reap"
)

// databaseURL returns a connection string of the administrator, who can read everything.
func databaseURL(t test, c *cluster.Cluster, name string) string {
	t.Helper()
	u, err := url.Parse(c.Stores.Postgres.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	return u.String()
}

// database connects as the administrator.
func database(t test, c *cluster.Cluster, name string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.ctx, databaseURL(t, c, name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.ctx)) })
	return conn
}

// column reads one column of text.
func column(t test, conn *pgx.Conn, sql string, args ...any) []string {
	t.Helper()
	rows, err := conn.Query(t.ctx, sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// launch is one line of the placement driver's launch log.
type launch struct {
	Op          string    `json:"op"`
	At          time.Time `json:"at"`
	WorkspaceID string    `json:"workspace_id"`
	Epoch       int64     `json:"epoch"`
}

// readLedger reads the launch log without the product's code.
func readLedger(t test, c *cluster.Cluster) []launch {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(c.Plan.InstanceDir, "launches.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var out []launch
	for line := range strings.Lines(string(data)) {
		if !strings.HasSuffix(line, "\n") {
			break // it is being written
		}
		var l launch
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("ledger: %v: %s", err, line)
		}
		out = append(out, l)
	}
	return out
}

// checkLedger checks that there is one launch for each workspace and epoch, and never two epochs of a workspace at
// once. It returns how many were launched and which instances live.
func checkLedger(t test, c *cluster.Cluster) (launched int, live map[string]int64) {
	t.Helper()
	count, live := map[string]int{}, map[string]int64{}
	for _, l := range readLedger(t, c) {
		instance := l.WorkspaceID + ":" + strconv.FormatInt(l.Epoch, 10)
		switch l.Op {
		case "intent", "launched":
			if l.Op == "launched" {
				count[instance]++
			}
			if other, ok := live[l.WorkspaceID]; ok && other != l.Epoch {
				t.Errorf("workspace %s: epoch %d begins while epoch %d lives", l.WorkspaceID, l.Epoch, other)
			}
			live[l.WorkspaceID] = l.Epoch
		case "ended":
			if live[l.WorkspaceID] == l.Epoch {
				delete(live, l.WorkspaceID)
			}
		}
	}
	for instance, n := range count {
		if n != 1 {
			t.Errorf("box %s was launched %d times", instance, n)
		}
		launched += n
	}
	return launched, live
}

// below lists the processes of a directory: agents, and workloads that serve the demo.
func below(t test, dir string) (agent, demo, all []reap.Process) {
	t.Helper()
	procs, err := reap.Under(dir, agents.Program)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		switch {
		case len(p.Args) > 1 && p.Args[1] == "run":
			agent = append(agent, p)
		case len(p.Args) > 1 && p.Args[1] == "demo-workload":
			demo = append(demo, p)
		}
	}
	return agent, demo, procs
}

func workspaces(t test, c *cluster.Cluster) []*readmodelv1.Workspace {
	t.Helper()
	var out []*readmodelv1.Workspace
	t.must("the list of workspaces", 20*time.Second, func(ctx context.Context) error {
		out = nil
		for token := ""; ; {
			resp, err := c.Client.Query.ListWorkspaces(ctx, &readmodelv1.ListWorkspacesRequest{PageSize: 500, PageToken: token})
			if err != nil {
				return err
			}
			out = append(out, resp.GetItems()...)
			if token = resp.GetNextPageToken(); token == "" {
				return nil
			}
		}
	})
	return out
}

// atRest reports whether a workspace will not change by itself.
func atRest(s commonv1.WorkspaceState) bool {
	switch s {
	case commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:
		return true
	default:
		return false
	}
}

// awaitRest waits until every workspace is settled, or those of some requests alone, and returns how many of each
// state there are.
func awaitRest(t test, c *cluster.Cluster, limit time.Duration, only ...*request) map[string]int {
	t.Helper()
	meant := func(name string) bool {
		return len(only) == 0 || slices.ContainsFunc(only, func(w *request) bool { return w.name == name })
	}
	var states map[string]int
	t.want("workspaces to settle", limit, func(context.Context) error {
		states = map[string]int{}
		var open []string
		for _, ws := range workspaces(t, c) {
			states[names.Of(ws.GetState())]++
			if !atRest(ws.GetState()) && meant(ws.GetName()) {
				open = append(open, fmt.Sprintf("%s %s %s: %s (%s)", ws.GetName(), ws.GetWorkspaceId(), names.Of(ws.GetState()),
					ws.GetCurrentStep(), ws.GetWhyWaiting()))
			}
		}
		if len(open) > 0 {
			return fmt.Errorf("%d workspaces are open: %s", len(open), strings.Join(open[:min(len(open), 8)], "; "))
		}
		return nil
	})
	return states
}

const tasksInFlight = `SELECT task_id || ' ' || type || ' ' || state FROM lifecycle.task
	WHERE state IN ('queued', 'dispatched', 'delivered', 'running')`

// checkWorld checks the promises about a mesh at rest, from outside. The mesh gets a while to come to rest: processes
// that died a moment ago are started again. Faults in its history remain.
func checkWorld(t test, c *cluster.Cluster) {
	t.Helper()
	mesh, tenants := database(t, c, pg.DatabaseMesh), database(t, c, pg.DatabaseWorkloads)
	var wrong []string
	var summary string
	// Faults that remain at the end are reported below.
	_ = insist(t.ctx, "the mesh to be at rest", time.Minute, func(ctx context.Context) error {
		if wrong, summary = observe(ctx, t, c, mesh, tenants); len(wrong) > 0 {
			return errors.New(wrong[0])
		}
		return nil
	})
	for _, w := range wrong {
		t.Error(w)
	}
	checkProjections(t, c, mesh)
	t.Log(summary)
}

// observe returns the broken promises, and counts of the objects.
func observe(ctx context.Context, t test, c *cluster.Cluster, mesh, tenants *pgx.Conn) (wrong []string,
	summary string,
) {
	t.Helper()
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	list := workspaces(t, c)
	launched, live := checkLedger(t, c)
	schemas := column(t, tenants, `SELECT nspname::text FROM pg_namespace WHERE nspname LIKE 't\_%' ORDER BY 1`)
	roles := column(t, tenants, `SELECT rolname::text FROM pg_roles WHERE rolname LIKE 't\_%' ORDER BY 1`)
	active := 0
	for _, ws := range list {
		instances := 0
		if epoch, ok := live[ws.GetWorkspaceId()]; ok {
			instances = 1
			if epoch != ws.GetEpoch() {
				complain("workspace %s has epoch %d, its box has epoch %d", ws.GetName(), ws.GetEpoch(), epoch)
			}
		}
		agent, demo, all := below(t, filepath.Join(c.Plan.InstanceDir, "boxes",
			ws.GetWorkspaceId()+"-"+strconv.FormatInt(ws.GetEpoch(), 10)))
		process := ws.GetSpec().GetPlacement() == commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS
		switch ws.GetState() {
		case commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE:
			active++
			if process && (instances != 1 || len(agent) != 1 || len(demo) != 1) {
				complain("workspace %s is active with %d boxes, %d agents and %d workloads", ws.GetName(), instances, len(agent),
					len(demo))
			}
			if len(ws.GetEndpoints()) != 1 {
				complain("workspace %s is active with the endpoints %v", ws.GetName(), ws.GetEndpoints())
				continue
			}
			if err := answers(ctx, ws.GetEndpoints()[0].GetUrl()); err != nil {
				complain("workspace %s is active and does not answer: %v", ws.GetName(), err)
			}
		case commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:
			if instances != 0 || len(all) != 0 {
				complain("workspace %s is %s and has %d boxes and %d processes: %v", ws.GetName(), names.Of(ws.GetState()),
					instances, len(all), all)
			}
		default:
			complain("workspace %s is %s", ws.GetName(), names.Of(ws.GetState()))
		}
	}
	if len(schemas) != active || len(roles) != active {
		complain("%d workspaces are active; the workload database has %d schemas and %d roles", active, len(schemas),
			len(roles))
	}
	_, demo, _ := below(t, c.Plan.InstanceDir)
	_, demoOnMachines, _ := below(t, filepath.Join(filepath.Dir(c.Plan.InstanceDir), "agents"))
	if n := len(demo) + len(demoOnMachines); n != active {
		complain("%d workloads run for %d active workspaces", n, active)
	}
	none := func(what, sql string) {
		if got := column(t, mesh, sql); len(got) > 0 {
			complain("%s: %d, such as %v", what, len(got), got[:min(len(got), 5)])
		}
	}
	none("live claims of workspaces that are not active",
		`SELECT w.name || ' ' || c.kind FROM lifecycle.resource_claim c JOIN lifecycle.workspace w ON w.id = c.workspace_id
		WHERE c.released_at IS NULL AND w.state <> 'active'`)
	none("orphaned claims", `SELECT kind || ' ' || deterministic_name FROM lifecycle.resource_claim
		WHERE orphaned_at IS NOT NULL`)
	none("live allocations of workspaces that are not active",
		`SELECT w.name || ' ' || a.state FROM lifecycle.allocation a JOIN lifecycle.workspace w ON w.id = a.workspace_id
		WHERE a.state <> 'released' AND w.state <> 'active'`)
	none("live instances of workspaces that are not active",
		`SELECT w.name || ' ' || i.state FROM lifecycle.instance i JOIN lifecycle.workspace w ON w.id = i.workspace_id
		WHERE i.state <> 'ended' AND w.state <> 'active'`)
	none("live identities of boxes that ended",
		`SELECT r.name || ' ' || r.state FROM recovery.identity r JOIN recovery.instance i ON i.node_id = r.node_id
		WHERE i.retired_at IS NOT NULL AND r.state <> 'retired'`)
	none("live runs", `SELECT id || ' ' || state || ' ' || why_waiting FROM lifecycle.saga_run
		WHERE state NOT IN ('succeeded', 'failed')`)
	none("open attempts", `SELECT run_id || ' ' || name || ' ' || state FROM lifecycle.saga_step
		WHERE state IN ('running', 'waiting')
		UNION ALL SELECT id || ' ' || step || ' ' || open_attempt FROM lifecycle.saga_run WHERE open_attempt > 0`)
	none("tasks in flight", tasksInFlight)
	for _, problem := range inLog(t, mesh) {
		complain("%s", problem)
	}
	none("alarms", `SELECT name || ' ' || state || ' ' || alarm FROM recovery.identity WHERE alarm <> ''`)
	none("identities shut", `SELECT name || ' ' || state FROM recovery.identity
		WHERE state IN ('held', 'quarantined', 'fenced')`)
	none("enrolments in flight", `SELECT node_id::text FROM recovery.enrollment WHERE state = 'claimed'`)
	none("events without a number", `SELECT e.kind FROM events.event e
		WHERE NOT EXISTS (SELECT FROM events.numbered n WHERE n.highest >= e.seq AND n.seqs @> e.seq)`)
	return wrong, fmt.Sprintf("at rest: %d workspaces, %d active; %d boxes launched, %d live; %d tasks", len(list), active,
		launched, len(live),
		len(column(t, mesh, `SELECT task_id::text FROM lifecycle.task`)))
}

// inLog returns contradictions in the event log: tasks without exactly one end, and epochs that fell. A result that
// comes after the end is reported with the state that stands, and with the time of that end.
func inLog(t test, mesh *pgx.Conn) []string {
	t.Helper()
	list, err := testkit.ReadEvents(t.ctx, mesh, `kind IN ('task.changed', 'workspace.changed')`)
	if err != nil {
		t.Fatal(err)
	}
	slices.SortStableFunc(list, func(a, b testkit.Event) int { return int(a.AggregateVersion - b.AggregateVersion) })
	ends, epochs := map[string]map[string]bool{}, map[string]int64{}
	var problems []string
	for _, e := range list {
		if e.Kind == "workspace.changed" {
			w := &lifecyclev1.Workspace{}
			if err := e.Decode(w); err != nil {
				t.Fatal(err)
			}
			if w.GetEpoch() < epochs[e.AggregateID] {
				problems = append(problems, "the epoch of "+e.AggregateID+" fell")
			}
			epochs[e.AggregateID] = w.GetEpoch()
			continue
		}
		changed := &lifecyclev1.TaskChanged{}
		if err := e.Decode(changed); err != nil {
			t.Fatal(err)
		}
		for _, tr := range changed.GetTransitions() {
			switch tr.GetState() { // the others are no ends
			case commonv1.TaskState_TASK_STATE_SUCCEEDED, commonv1.TaskState_TASK_STATE_FAILED,
				commonv1.TaskState_TASK_STATE_EXPIRED, commonv1.TaskState_TASK_STATE_CANCELLED,
				commonv1.TaskState_TASK_STATE_SUPERSEDED,
				commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN:
				if ends[e.AggregateID] == nil {
					ends[e.AggregateID] = map[string]bool{}
				}
				ends[e.AggregateID][tr.GetState().String()+tr.GetAt().AsTime().String()] = true
			}
		}
	}
	for _, id := range column(t, mesh, `SELECT task_id::text FROM lifecycle.task`) {
		if len(ends[id]) != 1 {
			problems = append(problems, fmt.Sprintf("task %s has %d ends: %v", id, len(ends[id]), ends[id]))
		}
	}
	return problems
}

// checkProjections compares the projections that people read with the owners' rows.
func checkProjections(t test, c *cluster.Cluster, mesh *pgx.Conn) {
	t.Helper()
	compare := func(what, sql string, told func(ctx context.Context) ([]string, error)) {
		t.Helper()
		t.want(what+" to be told as they are", 30*time.Second, func(ctx context.Context) error {
			got, err := told(ctx)
			if err != nil {
				return err
			}
			slices.Sort(got)
			want := column(t, mesh, sql)
			slices.Sort(want)
			if diff := cmp.Diff(want, got); diff != "" {
				return fmt.Errorf("-truth +told: %s", diff)
			}
			return nil
		})
	}
	compare("workspaces", `SELECT concat_ws(' ', id, name, state, epoch, version) FROM lifecycle.workspace`,
		func(context.Context) ([]string, error) {
			var out []string
			for _, ws := range workspaces(t, c) {
				out = append(out, fmt.Sprint(ws.GetWorkspaceId(), " ", ws.GetName(), " ", names.Of(ws.GetState()), " ",
					ws.GetEpoch(), " ", ws.GetVersion()))
			}
			return out, nil
		})
	compare("tasks", `SELECT concat_ws(' ', task_id, type, state, attempt) FROM lifecycle.task`,
		func(ctx context.Context) ([]string, error) {
			var out []string
			for token := ""; ; {
				resp, err := c.Client.Query.ListTasks(ctx, &readmodelv1.ListTasksRequest{PageSize: 500, PageToken: token})
				if err != nil {
					return nil, err
				}
				for _, task := range resp.GetItems() {
					out = append(out, fmt.Sprint(task.GetTaskId(), " ", names.Of(task.GetType()), " ", names.Of(task.GetState()), " ",
						task.GetAttempt()))
				}
				if token = resp.GetNextPageToken(); token == "" {
					return out, nil
				}
			}
		})
	compare("instances", `SELECT concat_ws(' ', instance_id, state, epoch, version) FROM lifecycle.instance`,
		func(ctx context.Context) ([]string, error) {
			var out []string
			for token := ""; ; {
				resp, err := c.Client.Query.ListInstances(ctx, &readmodelv1.ListInstancesRequest{PageSize: 500, PageToken: token})
				if err != nil {
					return nil, err
				}
				for _, i := range resp.GetItems() {
					out = append(out, fmt.Sprint(i.GetInstanceId(), " ", names.Of(i.GetState()), " ", i.GetEpoch(), " ",
						i.GetVersion()))
				}
				if token = resp.GetNextPageToken(); token == "" {
					return out, nil
				}
			}
		})
	compare("claims", `SELECT concat_ws(' ', id, kind, released_at IS NOT NULL) FROM lifecycle.resource_claim`,
		func(ctx context.Context) ([]string, error) {
			var out []string
			for token := ""; ; {
				resp, err := c.Client.Query.ListClaims(ctx,
					&readmodelv1.ListClaimsRequest{PageSize: 500, PageToken: token, IncludeReleased: true})
				if err != nil {
					return nil, err
				}
				for _, claim := range resp.GetItems() {
					out = append(out, fmt.Sprint(claim.GetClaimId(), " ", claim.GetKind(), " ",
						map[bool]string{true: "t", false: "f"}[claim.GetReleasedAt() != nil]))
				}
				if token = resp.GetNextPageToken(); token == "" {
					return out, nil
				}
			}
		})
	compare("nodes", `SELECT concat_ws(' ', node_id, name, state) FROM recovery.identity`,
		func(ctx context.Context) ([]string, error) {
			var out []string
			for token := ""; ; {
				resp, err := c.Client.Query.ListNodes(ctx,
					&readmodelv1.ListNodesRequest{PageSize: 500, PageToken: token, IncludeRetired: true})
				if err != nil {
					return nil, err
				}
				for _, n := range resp.GetItems() {
					out = append(out, n.GetNodeId()+" "+n.GetName()+" "+names.Of(n.GetIdentity().GetState()))
				}
				if token = resp.GetNextPageToken(); token == "" {
					return out, nil
				}
			}
		})
	resp, err := c.Client.Query.GetStatus(t.ctx, &readmodelv1.GetStatusRequest{})
	if err != nil {
		t.Error(err)
	}
	if resp.GetParkedEvents() != 0 {
		t.Errorf("%d events are parked", resp.GetParkedEvents())
	}
}

// hits returns the kill points that processes died at, with their pids.
func hits(t test, c *cluster.Cluster) (points map[string]int, pids map[int]bool) {
	t.Helper()
	points, pids = map[string]int{}, map[int]bool{}
	data, err := os.ReadFile(filepath.Join(filepath.Dir(c.Plan.InstanceDir), hitsFile))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		name, pid, ok := strings.Cut(strings.TrimSpace(line), " ")
		n, err := strconv.Atoi(pid)
		if !ok || err != nil {
			continue
		}
		points[name]++
		pids[n] = true
	}
	return points, pids
}

// checkLogs checks that no program ended by a fault of its own: every end was a kill of ours, and no program panicked.
func checkLogs(t test, c *cluster.Cluster, killed map[int]bool) {
	t.Helper()
	exits := map[*cluster.Process][]cluster.Exit{}
	for _, p := range c.Processes() {
		exits[p] = p.Exits()
	}
	// Read after the ends: a process that dies at a kill point, as it may at any time, has recorded it before.
	_, pids := hits(t, c)
	for p, ends := range exits {
		for _, exit := range ends {
			if exit.Cause != "signal: killed" || (!killed[exit.PID] && !pids[exit.PID]) {
				t.Errorf("%s (pid %d) ended by itself: %s; its log is %s", p.Name, exit.PID, exit.Cause, p.LogPath())
			}
		}
	}
	err := filepath.WalkDir(filepath.Dir(c.Plan.InstanceDir), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".log") || strings.HasSuffix(path, "postgres.log") {
			return nil //nolint:nilerr // directories of instances come and go
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return nil //nolint:nilerr // as above
		}
		for _, bad := range []string{"panic: ", "fatal error: ", "WARNING: DATA RACE", "\"task panicked\""} {
			if i := bytes.Index(data, []byte(bad)); i >= 0 {
				t.Errorf("%s: %s", path, data[i:min(len(data), i+400)])
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
