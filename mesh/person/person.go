// Package person calls a mesh as a person would: over the API for people, by bearer token, trusting only the issuer of
// services.
//
// It makes sessions of its own where it has access to the database, as in dev and clusters before any identity provider
// is configured. It uses no other way into the mesh.
package person

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/services/readmodel"
)

// Service is the name of the service that people call.
const Service = "readmodel"

// sessionLasts reports whether a token still is a session of a person that lasts for at least $5.
var sessionLasts = pg.Define(pg.RoleReadmodel, "person.session_lasts", `
	SELECT EXISTS (SELECT FROM readmodel.person_session
		WHERE token_sha256 = $1 AND subject = $2 AND roles = $3 AND COALESCE(tenant_id::text, '') = $4
			AND person_id IS NOT NULL
			AND revoked_at IS NULL AND expires_at > mesh.clock() + $5::interval)`)

// Session is a person's session.
type Session struct {
	Subject  string
	TenantID string // empty for people of the operator
	Roles    []string
	Life     time.Duration
}

func (s Session) admission() readmodel.Admission {
	return readmodel.Admission{Name: s.Subject, TenantID: s.TenantID, Roles: s.Roles, Life: s.Life}
}

// Admit returns the bearer token of a file if it still is a session of that person with at least half of its life left,
// else makes a session and puts its token there. databaseURL logs in as readmodel.
func Admit(ctx context.Context, databaseURL, file string, s Session) (string, error) {
	db, err := pg.Open(ctx, pg.Config{URL: databaseURL, ApplicationName: "gpuaas-admit", MaxConns: 1})
	if err != nil {
		return "", fmt.Errorf("admit person: %w", err)
	}
	defer db.Close()
	if token, err := config.SecretFile(file).Read(); err == nil {
		sum := sha256.Sum256([]byte(token.Reveal()))
		good, err := pg.Value[bool](ctx, db, sessionLasts, sum[:], s.Subject, slices.Sorted(slices.Values(s.Roles)),
			s.TenantID, s.Life/2)
		if err != nil {
			return "", fmt.Errorf("admit person: %w", err)
		}
		if good {
			return token.Reveal(), nil
		}
	}
	token, err := readmodel.AdmitPerson(ctx, db, s.admission())
	if err != nil {
		return "", fmt.Errorf("admit person: %w", err)
	}
	if err := pki.WriteFile(file, []byte(token+"\n")); err != nil {
		return "", fmt.Errorf("admit person: %w", err)
	}
	return token, nil
}

// Config names the addresses of the mesh and the person.
type Config struct {
	Server      string // host:port
	TrustDomain string
	Roots       *pki.Bundle
	Token       string
	Timeout     time.Duration // of one call; default 15 s
	// Interceptors wrap each call, and get the faults that it ends with.
	Interceptors []connect.Interceptor
}

// Client is a person's connection.
type Client struct {
	Query         readmodelv1connect.QueryServiceClient
	Command       readmodelv1connect.CommandServiceClient
	Incidents     readmodelv1connect.IncidentServiceClient
	Notifications readmodelv1connect.NotificationServiceClient
	Findings      readmodelv1connect.FindingServiceClient
	Audit         readmodelv1connect.AuditServiceClient
	Escalate      readmodelv1connect.EscalationServiceClient
	People        readmodelv1connect.PeopleServiceClient
	Release       readmodelv1connect.ReleaseServiceClient
	Rollback      readmodelv1connect.RollbackServiceClient
	HostFacts     readmodelv1connect.HostFactsServiceClient
	Keys          readmodelv1connect.KeyServiceClient
	Tokens        readmodelv1connect.TokenServiceClient
	Trust         readmodelv1connect.TrustServiceClient
	Instances     readmodelv1connect.InstanceServiceClient
	Retention     readmodelv1connect.RetentionServiceClient
	Projections   readmodelv1connect.ProjectionServiceClient
	Events        readmodelv1connect.EventServiceClient
	Diagnostics   readmodelv1connect.DiagnosticsServiceClient
	Actions       readmodelv1connect.ActionServiceClient
	Profiles      readmodelv1connect.ProfileServiceClient
	Bundles       readmodelv1connect.BundleServiceClient
	Authority     readmodelv1connect.AuthorityServiceClient

	http *http.Client
}

// Dial prepares a client; nothing is sent.
func Dial(cfg Config) (*Client, error) {
	if cfg.Token == "" {
		return nil, errors.New("dial mesh: no token")
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 15 * time.Second
	}
	hc, err := calls.HTTPClient(pki.ClientConfig{Roots: cfg.Roots, Server: pki.ServiceID(cfg.TrustDomain, Service)},
		calls.HTTPConfig{})
	if err != nil {
		return nil, fmt.Errorf("dial mesh: %w", err)
	}
	options := append([]connect.ClientOption{connect.WithInterceptors(cfg.Interceptors...)},
		calls.Options(calls.Config{Timeout: cfg.Timeout, MaxReadBytes: 16 << 20})...)
	options = append(options, connect.WithInterceptors(bearer(cfg.Token)))
	base := "https://" + cfg.Server
	return &Client{
		Query:         readmodelv1connect.NewQueryServiceClient(hc, base, options...),
		Command:       readmodelv1connect.NewCommandServiceClient(hc, base, options...),
		Incidents:     readmodelv1connect.NewIncidentServiceClient(hc, base, options...),
		Notifications: readmodelv1connect.NewNotificationServiceClient(hc, base, options...),
		Findings:      readmodelv1connect.NewFindingServiceClient(hc, base, options...),
		Audit:         readmodelv1connect.NewAuditServiceClient(hc, base, options...),
		Escalate:      readmodelv1connect.NewEscalationServiceClient(hc, base, options...),
		People:        readmodelv1connect.NewPeopleServiceClient(hc, base, options...),
		Release:       readmodelv1connect.NewReleaseServiceClient(hc, base, options...),
		Rollback:      readmodelv1connect.NewRollbackServiceClient(hc, base, options...),
		HostFacts:     readmodelv1connect.NewHostFactsServiceClient(hc, base, options...),
		Keys:          readmodelv1connect.NewKeyServiceClient(hc, base, options...),
		Tokens:        readmodelv1connect.NewTokenServiceClient(hc, base, options...),
		Trust:         readmodelv1connect.NewTrustServiceClient(hc, base, options...),
		Instances:     readmodelv1connect.NewInstanceServiceClient(hc, base, options...),
		Retention:     readmodelv1connect.NewRetentionServiceClient(hc, base, options...),
		Projections:   readmodelv1connect.NewProjectionServiceClient(hc, base, options...),
		Events:        readmodelv1connect.NewEventServiceClient(hc, base, options...),
		Diagnostics:   readmodelv1connect.NewDiagnosticsServiceClient(hc, base, options...),
		http:          hc,
		Actions:       readmodelv1connect.NewActionServiceClient(hc, base, options...),
		Profiles:      readmodelv1connect.NewProfileServiceClient(hc, base, options...),
		Bundles:       readmodelv1connect.NewBundleServiceClient(hc, base, options...),
		Authority:     readmodelv1connect.NewAuthorityServiceClient(hc, base, options...),
	}, nil
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// bearer sends the token with every call.
type bearer string

// WrapUnary implements connect.Interceptor.
func (b bearer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set("Authorization", "Bearer "+string(b))
		return next(ctx, req)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (b bearer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set("Authorization", "Bearer "+string(b))
		return conn
	}
}

// WrapStreamingHandler implements connect.Interceptor; it has no part on the server's side.
func (b bearer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}
