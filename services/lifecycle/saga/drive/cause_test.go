package drive_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// page is what was logged.
type page struct {
	mu   sync.Mutex
	text strings.Builder
}

func (p *page) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.text.Write(b)
}

// lines returns the lines of a run with that message.
func (p *page) lines(t *testing.T, message, runID string) []map[string]any {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []map[string]any
	for line := range strings.Lines(p.text.String()) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if m["msg"] == message && m["workflow_id"] == runID {
			out = append(out, m)
		}
	}
	return out
}

// Operators get the cause of a failure for every attempt: in the log with the ids that all services share, and in the
// timeline, which is its record. The tenant's text stays one sentence, and no secret is in either.
func TestTheCauseOfAFailureIsKeptWithoutSecrets(t *testing.T) {
	testkit.IO(t)
	const secret, public = "hunter22-hunter22", "no schema today"
	cause := fmt.Errorf("migration 2 of postgres://admin:%s@db/x: %w;\n\tpassword=%s %s", secret,
		&pgconn.PgError{Severity: "ERROR", Code: "42P07", Message: `relation "kv" already exists`}, secret,
		strings.Repeat("and so on ", 1000))
	steps := sagatest.PureSteps("schema", "never")
	steps[0].Undo = func(context.Context, *saga.Env) (saga.Outcome, error) {
		return saga.Outcome{}, fmt.Errorf("drop schema: %w", sagatest.ErrBoom)
	}
	steps[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		return saga.Outcome{}, saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DATABASE, commonv1.Reason_REASON_SCHEMA_FAILED,
			public, cause)
	}
	var log page
	logger, err := obs.NewLogger(&log, obs.LogConfig{Level: "info", Format: "json"})
	if err != nil {
		t.Fatal(err)
	}
	b := newBed(t)
	registry, err := saga.NewRegistry(saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	if err != nil {
		t.Fatal(err)
	}
	if b.Core, err = saga.New(saga.Deps{DB: b.DB.Pool(pg.RoleLifecycle), Registry: registry, Logger: logger}); err != nil {
		t.Fatal(err)
	}
	stop := b.Drive(b.Config("a"))
	ws, id := b.Create("toy")
	r := b.Await(id, testkit.Patience, "stuck")
	stop()
	if r.Error != public || b.Workspace(ws).LastError == "" ||
		strings.Contains(r.StuckReason+r.WhyWaiting+b.Workspace(ws).LastError, "42P07") {
		t.Errorf("people read %q, %q", r.Error, r.StuckReason)
	}
	list := b.Timeline(id)
	if len(list) != 6 {
		t.Fatalf("%d attempts, not three each way", len(list))
	}
	for _, a := range list {
		want := `relation "kv" already exists (SQLSTATE 42P07)`
		if a.Dir == "undo" {
			want = "drop schema: boom"
		} else if a.Error != public {
			t.Errorf("attempt %d tells everybody %q", a.Attempt, a.Error)
		}
		if got := a.Proto().GetCause(); !strings.Contains(got, want) || strings.Contains(got, secret) ||
			strings.Contains(got, "\n") || len([]rune(got)) > 600 {
			t.Errorf("%s attempt %d: cause = %q (%d)", a.Dir, a.Attempt, got, len(got))
		}
	}
	logged := log.lines(t, "step failed", id)
	if len(logged) != len(list) {
		t.Fatalf("%d failures are logged, not %d", len(logged), len(list))
	}
	for i, line := range logged {
		want, forGood, direction := "SQLSTATE 42P07", i%3 == 2, "do"
		if i >= 3 {
			want, direction = "drop schema: boom", "undo"
		}
		text, _ := line["error"].(string)
		if !strings.Contains(text, want) || strings.Contains(text, secret) || line["for_good"] != forGood ||
			line["direction"] != direction ||
			line["workspace_id"] != ws || line["tenant_id"] != b.Tenant || line["correlation_id"] != r.CorrelationID ||
			line["step"] != "schema" {
			t.Errorf("line %d = %v", i, line)
		}
	}
}

// The failure of a step that a later operation superseded is not logged as a warning if the database has that
// operation; any other failure is.
func TestASupersededStepIsNoWarning(t *testing.T) {
	for _, tt := range []struct {
		reason commonv1.Reason
		later  string // what the workspace has had since
		want   string
	}{
		{commonv1.Reason_REASON_TASK_SUPERSEDED, "op_seq = op_seq + 1", "INFO"},
		{commonv1.Reason_REASON_EPOCH_SUPERSEDED, "epoch = epoch + 1", "INFO"},
		{commonv1.Reason_REASON_FENCED_OUT, "op_seq = op_seq + 1", "INFO"},
		{commonv1.Reason_REASON_WORKLOAD_FAILED, "op_seq = op_seq + 1", "WARN"},
		{commonv1.Reason_REASON_TASK_SUPERSEDED, "", "WARN"},
		{commonv1.Reason_REASON_EPOCH_SUPERSEDED, "", "WARN"},
		{commonv1.Reason_REASON_FENCED_OUT, "", "WARN"},
	} {
		t.Run(tt.want+" for "+tt.reason.String()+" after "+tt.later, func(t *testing.T) {
			testkit.IO(t)
			b := newBed(t)
			steps := sagatest.PureSteps("schema", "never")
			steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
				if tt.later != "" {
					_, err := b.DB.Pool(pg.RoleLifecycle).Exec(ctx, `UPDATE lifecycle.workspace SET `+tt.later+` WHERE id = $1`,
						env.WorkspaceID)
					if err != nil {
						return saga.Outcome{}, err
					}
				}
				return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, tt.reason, "not done", nil)
			}
			var log page
			logger, err := obs.NewLogger(&log, obs.LogConfig{Level: "info", Format: "json"})
			if err != nil {
				t.Fatal(err)
			}
			registry, err := saga.NewRegistry(saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
			if err != nil {
				t.Fatal(err)
			}
			if b.Core, err = saga.New(saga.Deps{
				DB: b.DB.Pool(pg.RoleLifecycle), Registry: registry,
				Logger: logger,
			}); err != nil {
				t.Fatal(err)
			}
			stop := b.Drive(b.Config("a"))
			_, id := b.Create("toy")
			b.Await(id, testkit.Patience, "failed")
			stop()
			logged := log.lines(t, "step failed", id)
			if len(logged) != 1 || logged[0]["level"] != tt.want {
				t.Errorf("logged %v, want one line of level %s", logged, tt.want)
			}
		})
	}
}

// No cause is shown of a failure that has none.
func TestNoCauseIsNone(t *testing.T) {
	var none *saga.StepError
	failure, ok := errors.AsType[*saga.StepError](saga.Fail(0, commonv1.Reason_REASON_WORKLOAD_FAILED, "it exited", nil))
	if !ok || failure.Cause() != "" || none.Cause() != "" {
		t.Errorf("causes %q and %q", failure.Cause(), none.Cause())
	}
}
