package operation

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/gpuaas/mesh/devstack/redisserver"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
)

// asked returns the requests of the matrix, in the order of its columns. The second create has the same name and
// another spec.
func asked() []string {
	return []string{
		"create", "create other", "retry", "recreate", "decommission", "cancel", "reset", "retry_undo",
		"skip_undo",
	}
}

// matrix returns the answer to each request in each state: `begins`, `joins`, `does` (a verb on the existing run or
// workspace), or the reason of the refusal. No driver runs, so a state does not change by itself.
func matrix() map[string]string {
	return map[string]string{
		"creating": "joins workspace_name_taken joins joins operation_in_progress does " +
			"precondition_failed precondition_failed precondition_failed",
		"creating, cancelled": "workspace_name_taken workspace_name_taken operation_in_progress " +
			"operation_in_progress operation_in_progress does precondition_failed precondition_failed precondition_failed",
		"creating, undone": "workspace_name_taken workspace_name_taken operation_in_progress " +
			"operation_in_progress operation_in_progress does precondition_failed precondition_failed precondition_failed",
		"creating, stuck": "workspace_name_taken workspace_name_taken run_stuck run_stuck begins run_stuck " +
			"precondition_failed does does",
		"active": "workspace_name_taken workspace_name_taken precondition_failed begins begins " +
			"precondition_failed precondition_failed precondition_failed precondition_failed",
		"failed": "workspace_name_taken workspace_name_taken not_reset begins begins " +
			"precondition_failed does precondition_failed precondition_failed",
		"failed, reset": "workspace_name_taken workspace_name_taken begins begins begins " +
			"precondition_failed does precondition_failed precondition_failed",
		"retrying": "joins workspace_name_taken joins joins operation_in_progress does " +
			"precondition_failed precondition_failed precondition_failed",
		"retrying, undone": "workspace_name_taken workspace_name_taken operation_in_progress " +
			"operation_in_progress operation_in_progress does precondition_failed precondition_failed precondition_failed",
		"retrying, stuck": "workspace_name_taken workspace_name_taken run_stuck run_stuck begins run_stuck " +
			"precondition_failed does does",
		"recreating": "joins workspace_name_taken joins joins operation_in_progress does " +
			"precondition_failed precondition_failed precondition_failed",
		"recreating, cancelled": "workspace_name_taken workspace_name_taken operation_in_progress " +
			"operation_in_progress operation_in_progress does precondition_failed precondition_failed precondition_failed",
		"recreating, undone": "workspace_name_taken workspace_name_taken operation_in_progress " +
			"operation_in_progress operation_in_progress does precondition_failed precondition_failed precondition_failed",
		"recreating, stuck": "workspace_name_taken workspace_name_taken run_stuck run_stuck begins run_stuck " +
			"precondition_failed does does",
		"decommissioning": "workspace_name_taken workspace_name_taken operation_in_progress " +
			"operation_in_progress joins precondition_failed precondition_failed precondition_failed precondition_failed",
		"decommissioning, stuck": "workspace_name_taken workspace_name_taken run_stuck run_stuck begins run_stuck " +
			"precondition_failed does does",
		"decommissioned": "begins begins precondition_failed precondition_failed precondition_failed " +
			"precondition_failed precondition_failed precondition_failed precondition_failed",
		"active, its name another's": "workspace_name_taken workspace_name_taken precondition_failed begins begins " +
			"precondition_failed precondition_failed precondition_failed precondition_failed",
		"failed, the release has too": "workspace_name_taken workspace_name_taken not_reset previous_epoch_alive begins " +
			"precondition_failed does precondition_failed precondition_failed",
		"active, its plan is sold out": "workspace_name_taken workspace_name_taken precondition_failed plan_unknown " +
			"begins precondition_failed precondition_failed precondition_failed precondition_failed",
	}
}

// desk is a server without drivers, for one state of the lock store.
type desk struct {
	*bed

	n int
}

func (d *desk) sql(sql string, args ...any) {
	d.t.Helper()
	if _, err := d.db.OwnerPool().Exec(d.t.Context(), sql, args...); err != nil {
		d.t.Fatal(err)
	}
}

func (d *desk) do(kind commonv1.OperationKind, id string) string {
	d.t.Helper()
	res, err := d.server.RequestOperation(d.t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: kind, Reason: "a test asks", Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id},
	})
	if err != nil {
		d.t.Fatal(err)
	}
	return res.GetOperation().GetOperationId()
}

// put brings a new workspace into a state, by the requests that lead there; what a driver would write is written
// directly.
func (d *desk) put(state string) (string, string) {
	d.t.Helper()
	d.n++
	name := fmt.Sprintf("w%d", d.n)
	op, err := d.create(d.t.Context(), "acme", name, "", 1)
	if err != nil {
		d.t.Fatal(err)
	}
	id, run := op.GetWorkspaceId(), op.GetOperationId()
	ends := func(run, workspace string) {
		d.sql(`UPDATE lifecycle.saga_run SET state = $2, finished_at = mesh.clock(), why_waiting = ''
			WHERE workspace_id = $1 AND finished_at IS NULL`, id, run)
		d.sql(`UPDATE lifecycle.workspace SET state = $2, state_at = mesh.clock() WHERE id = $1`, id, workspace)
	}
	base, rest, _ := strings.Cut(state, ", ")
	switch base {
	case "creating":
	case "active", "recreating", "decommissioning", "decommissioned":
		ends("succeeded", "active")
	case "failed", "retrying":
		ends("failed", "failed")
	}
	switch base {
	case "recreating":
		run = d.do(kRecreate, id)
	case "decommissioning", "decommissioned":
		run = d.do(kDecommission, id)
	case "retrying":
		d.do(kReset, id)
		run = d.do(kRetry, id)
	}
	if base == "decommissioned" {
		ends("succeeded", "decommissioned")
	}
	switch rest {
	case "":
	case "cancelled":
		d.do(kCancel, id)
	case "undone":
		d.sql(`UPDATE lifecycle.saga_run SET state = 'compensating', phase = 'undo' WHERE id = $1`, run)
	case "stuck":
		phase := "undo"
		if base == "decommissioning" {
			phase = "do"
		}
		d.sql(`UPDATE lifecycle.saga_run SET state = 'stuck', phase = $2, stuck_reason = 'it does not go' WHERE id = $1`, run,
			phase)
		d.sql(`UPDATE lifecycle.workspace SET state = 'stuck' WHERE id = $1`, id)
	case "reset":
		d.do(kReset, id)
	case "its name another's":
		if _, err := d.create(d.t.Context(), "other", name, "", 1); err != nil {
			d.t.Fatal(err)
		}
	case "the release has too":
		d.sql(`INSERT INTO lifecycle.allocation (allocation_id, workspace_id, tenant_id, epoch, state, placement, gpus,
			occupancy)
			SELECT $2, id, tenant_id, epoch, 'release_failed', 'process', 1, 'cleanup' FROM lifecycle.workspace
				WHERE id = $1`, id, ids.New())
	case "its plan is sold out":
		d.sql(`UPDATE lifecycle.workspace SET spec = jsonb_set(spec, '{plan}', '"gold"') WHERE id = $1`, id)
	default:
		d.t.Fatalf("there is no way to %q", state)
	}
	return id, name
}

// answers sends a request and returns the kind of its answer or the reason of its refusal, the operation and the error.
func (d *desk) answers(what, id, name string) (string, *lifecyclev1.Operation, error) {
	d.t.Helper()
	before := d.count(`SELECT count(*) FROM lifecycle.saga_run`)
	var op *lifecyclev1.Operation
	var err error
	switch what {
	case "create":
		op, err = d.create(d.t.Context(), "acme", name, "", 1)
	case "create other":
		op, err = d.create(d.t.Context(), "acme", name, "", 2)
	default:
		kind, parseErr := names.Parse[commonv1.OperationKind](what)
		if parseErr != nil {
			d.t.Fatal(parseErr)
		}
		var res *lifecyclev1.RequestOperationResponse
		res, err = d.server.RequestOperation(d.t.Context(), &lifecyclev1.RequestOperationRequest{
			Kind: kind, Reason: "the matrix", Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id},
		})
		op = res.GetOperation()
	}
	made := d.count(`SELECT count(*) FROM lifecycle.saga_run`) - before
	switch {
	case err != nil:
		if made != 0 {
			d.t.Errorf("%s was refused and made %d runs", what, made)
		}
		return names.Of(fault.ReasonOf(err)), nil, err
	case op.GetJoined():
		if made != 0 {
			d.t.Errorf("%s joined and made %d runs", what, made)
		}
		return "joins", op, nil
	case made == 1:
		return "begins", op, nil
	default:
		return "does", op, nil
	}
}

// lockStates returns the states that the lock store may be in while requests come.
func lockStates(t *testing.T) map[string]func(t *testing.T) (*lock.Lock, func(workspaceID string)) {
	t.Helper()
	nothing := func(string) {}
	dial := func(t *testing.T) (*lock.Lock, *redisserver.Server, *redis.Client) {
		t.Helper()
		testkit.IO(t)
		server := testkit.Redis(t)
		client, err := lock.Dial(server.URL(), lock.Config{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = client.Close() })
		l, err := lock.New(lock.Deps{Client: client, Logger: testkit.Logger(t)}, lock.Config{Cooldown: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		return l, server, client
	}
	return map[string]func(t *testing.T) (*lock.Lock, func(string)){
		"none": func(*testing.T) (*lock.Lock, func(string)) { return nil, nothing },
		"up": func(t *testing.T) (*lock.Lock, func(string)) {
			t.Helper()
			l, _, _ := dial(t)
			return l, nothing
		},
		"flushed": func(t *testing.T) (*lock.Lock, func(string)) {
			t.Helper()
			l, _, client := dial(t)
			return l, func(string) { client.FlushAll(t.Context()) }
		},
		"lying": func(t *testing.T) (*lock.Lock, func(string)) {
			t.Helper()
			l, _, client := dial(t)
			return l, func(id string) { client.Set(t.Context(), "gpuaas:ws:"+id+":op", ids.New(), time.Minute) }
		},
		"dead": func(t *testing.T) (*lock.Lock, func(string)) {
			t.Helper()
			l, server, _ := dial(t)
			if err := server.Kill9(); err != nil {
				t.Fatal(err)
			}
			return l, nothing
		},
		"paused": func(t *testing.T) (*lock.Lock, func(string)) {
			t.Helper()
			l, server, _ := dial(t)
			if err := syscall.Kill(server.PID(), syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = syscall.Kill(server.PID(), syscall.SIGCONT) })
			return l, nothing
		},
	}
}

func TestEveryRequestInEveryState(t *testing.T) {
	t.Parallel()
	for store, open := range lockStates(t) {
		if store == "flushed" || store == "dead" {
			continue // to one caller at a time they are `up` and `paused`; many requests meet them below
		}
		t.Run("lock store "+store, func(t *testing.T) {
			joins, before := open(t)
			d := &desk{bed: newBed(t, joins)}
			for _, tenant := range []string{"acme", "other"} {
				_, err := d.server.CreateTenant(t.Context(), &lifecyclev1.CreateTenantRequest{
					Name: tenant, Quota: &lifecyclev1.Quota{Workspaces: 10000, Gpus: 10000, StorageBytes: 1 << 60},
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			for state, row := range matrix() {
				cells := strings.Fields(row)
				if len(cells) != len(asked()) {
					t.Fatalf("%q has %d cells", state, len(cells))
				}
				for i, what := range asked() {
					id, name := d.put(state)
					before(id)
					got, op, err := d.answers(what, id, name)
					if got != cells[i] {
						t.Errorf("%s: %s %s, want %s (%v)", state, what, got, cells[i], err)
						continue
					}
					d.check(state, what, id, got, op, err)
				}
			}
		})
	}
}

// check checks what must go with an answer.
func (d *desk) check(state, what, id, got string, op *lifecyclev1.Operation, err error) {
	d.t.Helper()
	live := d.count(`SELECT count(*) FROM lifecycle.saga_run WHERE workspace_id = '` + id + `' AND finished_at IS NULL`)
	if live > 1 {
		d.t.Errorf("%s: after %s %d operations are open", state, what, live)
	}
	if f, ok := fault.As(err); err != nil && (!ok || len(f.Unmet) == 0) {
		d.t.Errorf("%s: %s is refused (%s) and does not say what is unmet: %v", state, what, got, err)
	}
	switch got {
	case "joins":
		if n := d.count(`SELECT count(*) FROM lifecycle.saga_run WHERE id = '` + op.GetOperationId() +
			`' AND workspace_id = '` + id + `' AND finished_at IS NULL`); n != 1 {
			d.t.Errorf("%s: %s joined %s, which is not open", state, what, op.GetOperationId())
		}
	case "operation_in_progress":
		f, _ := fault.As(err)
		if f.ConflictingID == "" || f.Remedy == "" && fault.RowOf(f.Reason).Remedy == "" {
			d.t.Errorf("%s: %s is refused without the operation or a way out: %+v", state, what, f)
		}
	case "begins":
		if what != "recreate" && what != "retry" {
			return
		}
		if n := d.count(fmt.Sprintf(`SELECT count(*) FROM lifecycle.workspace
			WHERE id = '%s' AND epoch = %d
			AND run_id = '%s'`, id, op.GetEpoch(), op.GetOperationId())); n != 1 || op.GetEpoch() < 2 {
			d.t.Errorf("%s: %s began in epoch %d, which is not the workspace's", state, what, op.GetEpoch())
		}
	}
}

// A request gets the answer that the table of actions forecasts.
func TestActionsSayWhatRequestsAreAnswered(t *testing.T) {
	t.Parallel()
	d := &desk{bed: newBed(t, nil)}
	for _, tenant := range []string{"acme", "other"} {
		_, err := d.server.CreateTenant(t.Context(),
			&lifecyclev1.CreateTenantRequest{
				Name:  tenant,
				Quota: &lifecyclev1.Quota{Workspaces: 1000, Gpus: 1000, StorageBytes: 1 << 60},
			})
		if err != nil {
			t.Fatal(err)
		}
	}
	for state, row := range matrix() {
		for i, what := range asked() {
			kind, err := names.Parse[commonv1.OperationKind](what)
			if err != nil || kind == commonv1.OperationKind_OPERATION_KIND_CREATE {
				continue
			}
			answer := strings.Fields(row)[i]
			id, _ := d.put(state)
			res, err := d.server.GetActions(t.Context(), &lifecyclev1.GetActionsRequest{WorkspaceId: id})
			if err != nil {
				t.Fatal(err)
			}
			found := false
			for _, a := range res.GetActions() {
				if a.GetKind() != kind {
					continue
				}
				found = true
				if begins := answer == "begins" || answer == "does"; a.GetPossible() != begins &&
					!strings.HasSuffix(state, "cancelled") && !strings.HasSuffix(state, "undone") {
					t.Errorf("%s: %s is answered %s, the table says possible=%v", state, what, answer, a.GetPossible())
				}
				if !a.GetPossible() && (len(a.GetUnmet()) == 0 || a.GetReason() == commonv1.Reason_REASON_UNSPECIFIED) {
					t.Errorf("%s: %s is not possible and does not say why", state, what)
				}
				if a.GetConsequence() == "" {
					t.Errorf("%s: %s has no consequence", state, what)
				}
			}
			if !found {
				t.Errorf("the table does not know %s", what)
			}
		}
	}
}

// Many requests at the same time get one operation, whatever happens to the lock store meanwhile.
func TestManyRequestsJoinWhateverTheLockStoreDoes(t *testing.T) {
	for store, open := range lockStates(t) {
		t.Run(store, func(t *testing.T) {
			joins, disturb := open(t)
			d := &desk{bed: newBed(t, joins)}
			d.tenant("acme")
			id, _ := d.put("active")
			var group sync.WaitGroup
			var mu sync.Mutex
			operations := map[string]int{}
			began := 0
			for n := range 200 {
				group.Go(func() {
					if n%10 == 0 {
						disturb(id)
					}
					op, err := d.server.RequestOperation(context.WithoutCancel(t.Context()), &lifecyclev1.RequestOperationRequest{
						Kind: kRecreate, Reason: "a test asks", Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id},
					})
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					defer mu.Unlock()
					operations[op.GetOperation().GetOperationId()]++
					if !op.GetOperation().GetJoined() {
						began++
					}
				})
			}
			group.Wait()
			if len(operations) != 1 || began != 1 {
				t.Errorf("%d began, the answers name %v", began, operations)
			}
		})
	}
}
