package main

import (
	"context"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/beside"
	"github.com/gpuaas/mesh/bench/cancel"
	"github.com/gpuaas/mesh/bench/disconnect"
	"github.com/gpuaas/mesh/bench/fence"
	"github.com/gpuaas/mesh/bench/finished"
	"github.com/gpuaas/mesh/bench/fleet"
	"github.com/gpuaas/mesh/bench/idle"
	"github.com/gpuaas/mesh/bench/join"
	"github.com/gpuaas/mesh/bench/lives"
	"github.com/gpuaas/mesh/bench/reconnect"
	"github.com/gpuaas/mesh/bench/resume"
	"github.com/gpuaas/mesh/bench/sagas"
	"github.com/gpuaas/mesh/bench/schemas"
	"github.com/gpuaas/mesh/bench/streams"
	"github.com/gpuaas/mesh/bench/tasks"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/dev"
)

// bencher measures one thing on a database of its own.
type bencher func(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error)

func benchStreams(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return streams.Run(ctx, streams.Options{Agents: o.agents, Database: db, Command: benchChild, Logger: o.logger})
}

func benchTasks(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return tasks.Run(ctx, tasks.Options{Agents: o.agents, Database: db, Command: benchChild, Logger: o.logger})
}

func benchSagas(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return sagas.Run(ctx, sagas.Options{
		LifecycleURL: db.URL(pg.RoleLifecycle), SequencerURL: db.URL(pg.RoleSequencer), OwnerURL: db.URL(pg.RoleOwner),
		Logger: o.logger,
	})
}

func benchFinished(ctx context.Context, o benchOptions, _ *bench.Database) (bench.Result, error) {
	return finished.Run(ctx, finished.Options{Finished: o.ended, Version: o.version, Out: o.table, Logger: o.logger})
}

func benchJoin(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return join.Run(ctx, join.Options{
		LifecycleURL: db.URL(pg.RoleLifecycle), OwnerURL: db.URL(pg.RoleOwner),
		Logger: o.logger,
	})
}

func benchJoinAlone(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return join.Run(ctx, join.Options{
		LifecycleURL: db.URL(pg.RoleLifecycle), OwnerURL: db.URL(pg.RoleOwner),
		Logger: o.logger, WithoutRedis: true,
	})
}

func benchCancel(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return cancel.Run(ctx, cancel.Options{
		LifecycleURL: db.URL(pg.RoleLifecycle), SequencerURL: db.URL(pg.RoleSequencer), OwnerURL: db.URL(pg.RoleOwner),
		Logger: o.logger,
	})
}

func benchCancelAlone(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return cancel.Run(ctx, cancel.Options{
		LifecycleURL: db.URL(pg.RoleLifecycle), SequencerURL: db.URL(pg.RoleSequencer), OwnerURL: db.URL(pg.RoleOwner),
		Logger: o.logger, HeartbeatAlone: true,
	})
}

func benchResume(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return resume.Run(ctx, resume.Options{
		LifecycleURL: db.URL(pg.RoleLifecycle), SequencerURL: db.URL(pg.RoleSequencer), OwnerURL: db.URL(pg.RoleOwner),
		Command: benchChild, Logger: o.logger,
	})
}

func benchBesideDBOS(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return beside.Sagas(ctx, beside.Options{Database: db, Command: benchChild, Peers: benchPeers, Logger: o.logger})
}

func benchBesideRiver(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return beside.Tasks(ctx, beside.Options{Database: db, Command: benchChild, Peers: benchPeers, Logger: o.logger})
}

func benchIdle(ctx context.Context, o benchOptions, _ *bench.Database) (bench.Result, error) {
	return idle.Run(ctx, idle.Options{
		Length: time.Duration(o.minutes) * time.Minute, Version: o.version, Logger: o.logger,
	})
}

func benchFence(ctx context.Context, o benchOptions, _ *bench.Database) (bench.Result, error) {
	return fence.Run(ctx, fence.Options{Nodes: o.nodes, Rounds: o.rounds, Version: o.version, Logger: o.logger})
}

func benchDisconnect(ctx context.Context, o benchOptions, _ *bench.Database) (bench.Result, error) {
	return disconnect.Run(ctx, disconnect.Options{
		Nodes: o.nodes, Rounds: o.rounds, Replicas: o.replicas, CacheDir: dev.CacheDir(), Logger: o.logger,
	})
}

func benchReconnect(ctx context.Context, o benchOptions, _ *bench.Database) (bench.Result, error) {
	return reconnect.Run(ctx, reconnect.Options{
		Agents: o.agents, Replicas: o.replicas, Rounds: o.rounds, Command: benchChild, Version: o.version,
		CacheDir: dev.CacheDir(), Out: o.table, Logger: o.logger,
	})
}

func benchFleet(ctx context.Context, o benchOptions, _ *bench.Database) (bench.Result, error) {
	if o.instances > 0 {
		o.nodes, o.spaces = o.instances, o.instances
	}
	if o.sweeps {
		return fleet.RunSweeps(ctx, fleet.SweepOptions{
			Nodes: o.nodes, Workspaces: o.spaces, Instances: o.instances > 0, Version: o.version, Logger: o.logger,
		})
	}
	return fleet.Run(ctx, fleet.Options{
		Nodes: o.nodes, Workspaces: o.spaces, Instances: o.instances > 0, History: o.history, HistoryDays: o.days,
		Cache: o.cache, Version: o.version, Out: o.table, Logger: o.logger,
	})
}

func benchSchemas(ctx context.Context, o benchOptions, db *bench.Database) (bench.Result, error) {
	return schemas.Run(ctx, schemas.Options{Schemas: o.schemas, Database: db, Out: o.table})
}

func benchList(ctx context.Context, o benchOptions, _ *bench.Database) (bench.Result, error) {
	return fleet.RunList(ctx, fleet.ListOptions{
		Nodes: o.nodes, Workspaces: o.spaces, Profile: o.profile, Version: o.version, Logger: o.logger,
	})
}

func benchLives(ctx context.Context, o benchOptions, _ *bench.Database) (bench.Result, error) {
	return lives.Run(ctx, lives.Options{
		Lives: o.lives, Clients: o.clients, Version: o.version, Out: o.table,
		Logger: o.logger,
	})
}

func benchSoak(ctx context.Context, o benchOptions, _ *bench.Database) (bench.Result, error) {
	return lives.Soak(ctx, lives.SoakOptions{
		Options: lives.Options{Clients: o.clients, Version: o.version, Out: o.table, Logger: o.logger},
		Length:  time.Duration(o.minutes) * time.Minute,
	})
}
