package plans_test

import (
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/meshtest"
	"github.com/gpuaas/mesh/mesh/plans"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// size of the fleet that the test plans statements on.
var size = plans.Size{Nodes: 1000, Workspaces: 10000}

var made struct {
	once sync.Once
	tmpl *plans.Template
	err  error
}

// enrolled returns the template of a machine that was enrolled beforehand, with a workspace that has ended. The tests
// share it, because a mesh runs to make it.
func enrolled(t *testing.T) *plans.Template {
	t.Helper()
	agent := filepath.Join(meshtest.Programs(t), agents.Program)
	made.once.Do(func() {
		made.tmpl, made.err = plans.Make(testkit.Context(t), plans.Source{
			Agent: agent, Version: "test", Ended: true, Logger: slog.New(slog.DiscardHandler),
		})
	})
	if made.err != nil {
		t.Fatal(made.err)
	}
	return made.tmpl
}

// cutBuffers is how many buffers a cut of one row may touch, most of them of the catalogue.
const cutBuffers = 1500

// TestStatementsReadWhatTheirAnswersNeed: on 1,000 machines with 10,000 workspaces no statement reads more than ten
// times the rows that its answer needs, with a plan that serves all arguments. Those that read the whole fleet are
// named with their bound.
func TestStatementsReadWhatTheirAnswersNeed(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	tmpl := enrolled(t)
	if err := tmpl.Load(ctx, db.AdminURL(), size); err != nil {
		t.Fatal(err)
	}
	admin, err := pgx.Connect(ctx, db.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(ctx)
	if few := tmpl.Few(size); len(few) > 0 {
		t.Errorf("the template has no rows of these tables, though they have ids of machines or workspaces: %q", few)
	}
	args, err := plans.NewArguments(ctx, admin)
	if err != nil {
		t.Fatal(err)
	}
	ran, refused := map[string]*pg.Statement{}, map[string]bool{}
	for _, s := range plans.Measured() {
		role := s.Roles()[0]
		conn, err := db.Pool(role).Acquire(ctx)
		if err != nil {
			t.Fatal(err)
		}
		literals, err := args.For(ctx, conn.Conn(), s)
		conn.Release()
		if err != nil {
			t.Error(err)
			continue
		}
		cost, err := plans.Explain(ctx, db.Pool(role), s, literals)
		switch {
		case errors.Is(err, plans.ErrNoPlan):
			continue
		case err != nil && !plans.Refused(s):
			t.Errorf("%s is not planned, and not among those whose arguments are refused: %v", s.Name(), err)
			continue
		case err != nil:
			refused[s.Name()] = true
			continue
		}
		ran[s.Name()] = s
		if most := plans.Most(s, size, cost.Returned); cost.Rows > most {
			t.Errorf("%s as %s reads %d rows for %d, more than %d:\n%s\n%q\n%s", s.Name(), role, cost.Rows, cost.Returned, most,
				s.SQL(), literals, cost.Plan)
		}
		// The reads of a function are not in the plan. It is planned at the first call of a session, and the first cut of a
		// day makes partitions.
		cut := strings.HasSuffix(s.Name(), ".cut_batch")
		if cut && cost.Buffers > cutBuffers {
			if cost, err = plans.Explain(ctx, db.Pool(role), s, literals); err != nil {
				t.Fatal(err)
			}
		}
		if cut && cost.Buffers > cutBuffers {
			t.Errorf("%s as %s touches %d buffers for a batch of one row, more than %d:\n%s", s.Name(), role, cost.Buffers,
				cutBuffers, s.SQL())
		}
	}
	if len(ran) < 700 {
		t.Errorf("only %d statements ran", len(ran))
	}
	for name, s := range ran {
		if plans.Refused(s) && !refused[name] {
			t.Errorf("%s is planned, and is said to be refused", name)
		}
	}
}

// TestTheListsOfTheFleetAreOfStatements checks that each bound is of a statement that exists: one of a statement that
// is gone bounds nothing.
func TestTheListsOfTheFleetAreOfStatements(t *testing.T) {
	var names []string
	for _, s := range pg.Statements() {
		names = append(names, s.Name())
	}
	for _, name := range plans.Named() {
		if !slices.Contains(names, name) {
			t.Errorf("there is no statement %s", name)
		}
	}
}

// TestEveryStatementHasAClass: a statement that may grow with the fleet has a reason, and each has a requirement.
func TestEveryStatementHasAClass(t *testing.T) {
	for _, s := range pg.Statements() {
		class := plans.ClassOf(s)
		if class.Name == "" || class.Growth <= 0 || class.Growth > 1.1 {
			t.Errorf("%s is of class %+v", s.Name(), class)
		}
		if plans.Whole(s) && class.Reason == "" {
			t.Errorf("%s looks at the whole fleet, and nothing says why", s.Name())
		}
	}
}
