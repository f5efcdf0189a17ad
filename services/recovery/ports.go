package recovery

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/services/recovery/drift/judge"
	"github.com/gpuaas/mesh/services/recovery/fleet"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

func (s *Service) openPort(ctx context.Context) error {
	var err error
	s.internal, err = s.base.InternalServer(ctx, s.keys.persons)
	return err
}

func (s *Service) openLifecycle(context.Context) error {
	var err error
	s.lifecycle, err = s.base.Peer("lifecycle", s.cfg.Peers.Lifecycle, nil)
	return err
}

// serveAnnounced mounts the verb that announces rows of this service again.
func (s *Service) serveAnnounced(context.Context) error {
	rows := slices.Concat(watchdog.Announced(), fleet.Announced(), judge.Announced())
	return s.internal.Mount(commonv1connect.NewAnnounceServiceHandler(
		reannounce.NewServer(s.base.DB, s.base.Wake.Notify, append(rows, identity.Announced())...),
		s.internal.HandlerOptions()...))
}

// serveEnrolment opens the port at which machines enrol, if this replica has one.
func (s *Service) serveEnrolment(ctx context.Context) error {
	if s.cfg.EnrollListen == "" {
		return nil
	}
	var err error
	s.enroll, err = port.New(ctx, port.Deps{
		Logger: s.base.Logger, Registerer: s.base.Registry.ForService(s.base.Name), Translate: pg.Fault,
	}, port.Config{
		Name: "enrollment", Addr: s.cfg.EnrollListen, MaxReadBytes: 64 << 10, MaxStreams: 16,
		// Any client can connect to this port, so a slow client must not keep a connection for long.
		RequestTimeout: 15 * time.Second, IdleTimeout: 10 * time.Second,
		TLS: pki.ServerConfig{Store: s.base.Store, TrustDomain: s.base.Config.TrustDomain},
	})
	if err != nil {
		return fmt.Errorf("open enrolment port: %w", err)
	}
	s.base.Add(app.Task{Name: "enrolment", Phase: app.PhaseDrain, Run: s.enroll.Run})
	return s.enroll.Mount(recoveryv1connect.NewEnrollmentServiceHandler(&enrolment{enroller: s.enroller},
		s.enroll.HandlerOptions()...))
}

// Addr returns the address of the internal port, which other services call.
func (s *Service) Addr() string { return s.internal.Addr().String() }

// EnrollAddr returns the address at which machines enrol; empty if this replica serves no enrolment.
func (s *Service) EnrollAddr() string {
	if s.enroll == nil {
		return ""
	}
	return s.enroll.Addr().String()
}
