package stores_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/mesh/meshtest"
	"github.com/gpuaas/mesh/mesh/stores"
)

func TestStoresComeUpPreparedAndComeBack(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	dir := meshtest.Dir(t)
	m, err := material.Make(material.Config{Dir: filepath.Join(dir, "material"), TrustDomain: "mesh.test"})
	if err != nil {
		t.Fatal(err)
	}
	cfg := stores.Config{Dir: filepath.Join(dir, "postgres")}
	s, err := stores.Start(ctx, testkit.Logger(t), m, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if s.Facts.Fsync != "on" || s.Facts.Migrated == 0 {
		t.Errorf("facts %+v", s.Facts)
	}
	login := func() error {
		for _, role := range append(pg.Roles(), pg.RoleOwner) {
			url, err := config.SecretFile(m.URLFile(role)).Read()
			if err != nil {
				return err
			}
			conn, err := pgx.Connect(ctx, url.Reveal())
			if err != nil {
				return err
			}
			if err := conn.Close(ctx); err != nil {
				return err
			}
		}
		return nil
	}
	if err := login(); err != nil {
		t.Fatal(err)
	}
	kept, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.Keep(kept) }()
	before := s.Postgres.PID()
	if err := s.Postgres.Kill9(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if s.Postgres.PID() == before {
			return errors.New("not yet another process")
		}
		return login()
	})
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := s.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	// The same directory again: nothing to migrate, same passwords.
	if s, err = stores.Start(ctx, testkit.Logger(t), m, cfg); err != nil {
		t.Fatal(err)
	}
	if s.Facts.Migrated != 0 {
		t.Errorf("%d migrations the second time", s.Facts.Migrated)
	}
	if err := login(); err != nil {
		t.Error(err)
	}
	if err := s.Stop(ctx); err != nil {
		t.Error(err)
	}
}

func TestAnImitationOfRedisIsTakenOnRequest(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	dir := meshtest.Dir(t)
	m, err := material.Make(material.Config{Dir: filepath.Join(dir, "material"), TrustDomain: "mesh.test"})
	if err != nil {
		t.Fatal(err)
	}
	s, err := stores.Start(ctx, testkit.Logger(t), m,
		stores.Config{Dir: filepath.Join(dir, "postgres"), RedisURL: stores.EmbeddedRedis})
	if err != nil {
		t.Fatal(err)
	}
	if kind := s.RedisKind(); kind != "in-process imitation" {
		t.Errorf("Redis is a %s", kind)
	}
	written, err := os.ReadFile(m.RedisURLFile())
	if err != nil || string(written) != s.Redis.URL()+"\n" {
		t.Errorf("services are told %q, %v, not %q", written, err, s.Redis.URL())
	}
	if err := s.Stop(context.WithoutCancel(ctx)); err != nil {
		t.Error(err)
	}
}
