package meshstatus

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// historySize is the size of the event log and of the database, both in bytes, and the time since which an event is
// parked.
type historySize struct {
	Events       int64      `db:"events"`
	Database     int64      `db:"database"`
	OldestParked *time.Time `db:"oldest_parked"`
}

var readHistorySize = pg.Define(pg.RoleReadmodel, "status.history_size", `
	SELECT (SELECT sum(pg_total_relation_size(p.relid)) FROM pg_partition_tree('events.event') p)::bigint
			+ pg_total_relation_size('events.numbered') AS events,
		pg_database_size(current_database()) AS database, mesh.oldest_parked() AS oldest_parked`)

// storageSample is recovery's last measurement of the database's storage.
type storageSample struct {
	Limit   int64     `db:"limit_bytes"`
	PerDay  int64     `db:"bytes_per_day"`
	Problem string    `db:"problem"`
	At      time.Time `db:"at"`
}

var newestSample = pg.Define(pg.RoleReadmodel, "status.newest_storage_sample", `
	SELECT `+pg.Columns[storageSample]("s")+` FROM mesh.storage_sample s ORDER BY s.at DESC LIMIT 1`)

// sampleStale is the age from which on a sample of the storage is ignored. Recovery takes one every five minutes.
const sampleStale = 15 * time.Minute

// history returns how much space history takes, and the status components of the storage and of retention.
func (r *Reporter) history(ctx context.Context) (*readmodelv1.HistoryStatus, []*readmodelv1.ComponentStatus, error) {
	size, err := pg.One[historySize](ctx, r.deps.DB, readHistorySize)
	if err != nil {
		return nil, nil, fmt.Errorf("read size of history: %w", err)
	}
	accounts, err := retention.Accounts(ctx, r.deps.DB)
	if err != nil {
		return nil, nil, err
	}
	out := &readmodelv1.HistoryStatus{
		EventsBytes: size.Events, DatabaseBytes: size.Database,
		OldestParkedAt: stamp(size.OldestParked),
	}
	var components []*readmodelv1.ComponentStatus
	sample, err := pg.One[storageSample](ctx, r.deps.DB, newestSample)
	switch {
	case err == nil:
		out.LimitBytes, out.BytesPerDay = sample.Limit, sample.PerDay
		components = append(components, storageComponent(sample))
	case !pg.IsNoRows(err):
		return nil, nil, fmt.Errorf("read the newest sample of storage: %w", err)
	}
	if len(accounts) > 0 {
		slowest := slices.MaxFunc(accounts, func(a, b retention.Account) int {
			return cmp.Compare(a.Lag-a.LateAfter(), b.Lag-b.LateAfter())
		})
		for _, a := range accounts {
			out.RetentionLagSeconds = max(out.GetRetentionLagSeconds(), int64(a.Lag.Seconds()))
		}
		components = append(components, retentionComponent(slowest, wallclock.Now()))
	}
	consumers, err := readConsumers(ctx, r.deps.DB)
	if err != nil {
		return nil, nil, err
	}
	now := wallclock.Now()
	for _, c := range []*readmodelv1.ComponentStatus{consumersComponent(consumers, now), parkedComponent(consumers, now)} {
		if c != nil {
			components = append(components, c)
		}
	}
	return out, components, nil
}

func storageComponent(s storageSample) *readmodelv1.ComponentStatus {
	c := component("storage", s.Problem == "", s.Problem, s.At)
	if wallclock.Now().Sub(s.At) > sampleStale {
		c.Ok, c.State, c.Detail = false, commonv1.PartState_PART_STATE_UNKNOWN, "recovery has not looked since"
		return c
	}
	if c.GetOk() {
		c.Detail = "there is room"
		if s.Limit == 0 {
			c.Detail = "what the database may take is not known"
		}
		return c
	}
	c.Severity = commonv1.Severity_SEVERITY_P1
	c.NextAction = "give the database more room and set storage.limit_mebibytes to it, or shorten the terms of history " +
		"and rewrite the tables (VACUUM FULL)"
	return c
}

func retentionComponent(a retention.Account, now time.Time) *readmodelv1.ComponentStatus {
	name := a.Service + "/" + a.Cut
	c := component("retention", !a.Late(), "what is over is cut in time", now)
	if !c.GetOk() {
		lag := a.Lag.Round(time.Second).String()
		c.Detail = "the slowest walk, " + name + ", ended " + lag + " ago"
		if a.DoneAt == nil {
			c.Detail = "the walk " + name + ", which began " + lag + " ago, has never come to its end"
		}
		c.Severity = commonv1.Severity_SEVERITY_P2
		c.NextAction = "look at the failure of " + name + " in `gpuaas retention status`, and at the log of " + a.Service +
			"; where no replica has the configuration of this cut any more, it is forgotten 30 days after its last walk"
	}
	return c
}

func stamp(at *time.Time) *timestamppb.Timestamp {
	if at == nil {
		return nil
	}
	return timestamppb.New(*at)
}
