package readmodel_test

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
)

// locked is a buffer for several writers.
type locked struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *locked) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *locked) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// The token is in the answer and is stored nowhere.
func TestTheTokenOfAPersonIsKeptNowhere(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	log := &locked{}
	k.service = k.startLogging(
		k.config,
		slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	)
	people := k.peopleOf(k.admitted("root", "", "operator", "security"))
	made, err := people.CreatePerson(ctx, person("carol", "", "viewer"))
	k.check(err)
	if _, err := k.query(made.GetToken()).WhoAmI(ctx, &readmodelv1.WhoAmIRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := people.CreatePerson(
		ctx,
		person("carol", "", "viewer"),
	); !fault.Has(
		fault.FromConnect(err),
		commonv1.Reason_REASON_ALREADY_EXISTS,
	) {
		t.Fatal(err)
	}
	auditOf(t, k, 2, &readmodelv1.ListAuditRequest{Action: "person.create"})
	secret := strings.SplitN(made.GetToken(), "_", 3)[2]
	if text := log.String(); strings.Contains(text, secret) || !strings.Contains(text, "CreatePerson") {
		t.Errorf("the log: %s", text)
	}
	for _, table := range []string{"readmodel.person", "readmodel.person_session", "readmodel.audit", "events.event"} {
		var rows, kept int
		err := k.DB.Pool(
			pg.RoleReadmodel,
		).QueryRow(
			ctx,
			"SELECT count(*), count(*) FILTER (WHERE x::text LIKE '%' || $1 || '%' OR x::text LIKE '%' || encode($1::bytea, "+
				"'hex') || '%') FROM "+table+" x",
			secret,
		).Scan(
			&rows,
			&kept,
		)
		if err != nil || rows == 0 || kept != 0 {
			t.Errorf("%s: %d of %d rows hold the token, %v", table, kept, rows, err)
		}
	}
}

// A person who was admitted without the API is listed like any other, also after a second admission.
func TestAdmittedPeopleAreListed(t *testing.T) {
	k := newKit(t)
	ctx := testkit.Context(t)
	first := k.admitted("dev", "", "security", "operator")
	second := k.admitted("dev", "", "operator", "security")
	people := k.peopleOf(second)
	list, err := people.ListPeople(ctx, &readmodelv1.ListPeopleRequest{})
	if err != nil || len(list.GetItems()) != 1 ||
		!slices.Equal(list.GetItems()[0].GetRoles(), []string{"operator", "security"}) {
		t.Fatalf("%v, %v", list, err)
	}
	if _, err := k.query(first).WhoAmI(ctx, &readmodelv1.WhoAmIRequest{}); err != nil {
		t.Errorf("the earlier session: %v", err)
	}
	third := k.admitted("dev", "", "viewer")
	if _, err := k.query(
		first,
	).WhoAmI(
		ctx,
		&readmodelv1.WhoAmIRequest{},
	); rpctest.ReasonOfWire(
		err,
	) != commonv1.Reason_REASON_UNAUTHENTICATED {
		t.Errorf("a session with rights that were taken: %v", err)
	}
	if me, err := k.query(
		third,
	).WhoAmI(
		ctx,
		&readmodelv1.WhoAmIRequest{},
	); err != nil ||
		!slices.Equal(me.GetRoles(), []string{"viewer"}) {
		t.Errorf("%v, %v", me, err)
	}
}
