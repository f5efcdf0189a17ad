package wave_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const unknown = commonv1.Reason_REASON_SERIAL_UNKNOWN

// fleet makes active nodes.
func fleet(t *testing.T, pool *pgxpool.Pool, count int) {
	t.Helper()
	err := pg.InTx(testkit.Context(t), pool, func(ctx context.Context, tx pgx.Tx) error {
		m, err := identity.ReadMoment(ctx, tx)
		if err != nil {
			return err
		}
		for i := range count {
			r := &identity.Record{NodeID: ids.New(), Name: fmt.Sprintf("node-%d", i)}
			if _, err := identity.Insert(ctx, tx, r); err != nil {
				return err
			}
			key := make([]byte, 32)
			_, _ = rand.Read(key)
			s := identity.Serial{
				Serial: fmt.Sprintf("%x", key[:8]), KeySHA256: key, ChainPEM: []byte("c"), NotBefore: m.Now,
				NotAfter: m.Now.Add(time.Hour),
			}
			if err := identity.Activate(ctx, tx, r, ids.New(), s, "test", "enrolled", m); err != nil {
				return err
			}
			if _, err := identity.Save(ctx, tx, r); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// If many nodes are refused at once by several replicas, no more than the share of the fleet are refused for good; the
// same node counts once.
func TestNoMoreThanTheShareAreRefused(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool, ctx := db.Pool(pg.RoleRecovery), testkit.Context(t)
	fleet(t, pool, 60)
	limits := wave.Limits{Fraction: 0.1, Least: 2}
	refused := make(chan string, 80)
	var replicas sync.WaitGroup
	for range 4 {
		replicas.Go(func() {
			for range 10 {
				node := ids.New()
				for range 2 {
					switch err := wave.Refuse(ctx, pool, limits, node, fault.New(unknown, "")); fault.ReasonOf(err) {
					case unknown:
						refused <- node
					case commonv1.Reason_REASON_RECORDS_MISSING:
					default:
						t.Errorf("refused with %v", err)
					}
				}
			}
		})
	}
	replicas.Wait()
	close(refused)
	nodes := map[string]bool{}
	for node := range refused {
		nodes[node] = true
	}
	if len(nodes) != 6 {
		t.Errorf("%d nodes were refused, want 6 of 60", len(nodes))
	}
	state, err := wave.Read(ctx, pool, limits)
	if err != nil || state.Suspects != 40 || state.Fleet != 60 || !state.Over(limits) {
		t.Errorf("%+v, %v", state, err)
	}
	words, named, err := wave.Describe(ctx, pool)
	if err != nil || words != "serial_unknown 40" || len(named) != 32 {
		t.Errorf("%q, %d nodes, %v", words, len(named), err)
	}
}

// A caller with an unknown token does not engage the brake, and is told to wait while it is engaged.
func TestStrangersWaitAndCountForNothing(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool, ctx := db.Pool(pg.RoleRecovery), testkit.Context(t)
	refusal := fault.New(commonv1.Reason_REASON_TOKEN_INVALID, "")
	for range 10 {
		if err := wave.Soften(ctx, pool, refusal); fault.ReasonOf(err) != commonv1.Reason_REASON_TOKEN_INVALID {
			t.Fatalf("without a wave: %v", err)
		}
	}
	if state, err := wave.Read(ctx, pool, wave.LimitsOf(nil)); err != nil || state.Suspects != 0 {
		t.Errorf("%+v, %v", state, err)
	}
	if _, err := pool.Exec(ctx, `UPDATE recovery.brake SET engaged = true`); err != nil {
		t.Fatal(err)
	}
	err := wave.Soften(ctx, pool, refusal)
	if fault.ReasonOf(err) != commonv1.Reason_REASON_RECORDS_MISSING ||
		fault.ActionOf(err) != commonv1.Action_ACTION_WAIT {
		t.Errorf("while the brake is engaged: %v", err)
	}
	for _, reason := range []commonv1.Reason{
		commonv1.Reason_REASON_TOKEN_CONSUMED,
		commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED,
	} {
		if err := wave.Soften(ctx, pool, fault.New(reason, "")); fault.ReasonOf(err) != reason {
			t.Errorf("%v has become %v", reason, err)
		}
	}
	if !strings.Contains(fault.RowOf(commonv1.Reason_REASON_RECORDS_MISSING).Remedy, "gpuaas brake status") {
		t.Error("the remedy names no verb")
	}
}
