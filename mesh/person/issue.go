package person

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/services/readmodel"
)

// Issue returns the bearer token of a session whose token is stored nowhere else: of a person of a tenant, or of the
// operator if tenantID is empty. databaseURL logs in as readmodel.
func Issue(ctx context.Context, databaseURL, tenantID string, s Session) (string, error) {
	db, err := pg.Open(ctx, pg.Config{URL: databaseURL, ApplicationName: "gpuaas-admit", MaxConns: 1})
	if err != nil {
		return "", fmt.Errorf("admit person: %w", err)
	}
	defer db.Close()
	s.TenantID = tenantID
	token, err := readmodel.AdmitPerson(ctx, db, s.admission())
	if err != nil {
		return "", fmt.Errorf("admit person: %w", err)
	}
	return token, nil
}

// SessionLife is the life of a session in a mesh of one machine. It is long, since the token never leaves the machine
// and each start prolongs it.
const SessionLife = 30 * 24 * time.Hour

// Operator admits the person of a mesh who has all roles but tenant, and returns the token and a client.
func Operator(ctx context.Context, m *material.Material, trustDomain, subject, server string) (string, *Client, error) {
	url, err := config.SecretFile(m.URLFile(pg.RoleReadmodel)).Read()
	if err != nil {
		return "", nil, err
	}
	token, err := Admit(ctx, url.Reveal(), filepath.Join(m.Dir, "person.token"), Session{
		Subject: subject, Roles: []string{"operator", "security", "viewer"}, Life: SessionLife,
	})
	if err != nil {
		return "", nil, err
	}
	client, err := Reach(m, trustDomain, server, token)
	return token, client, err
}

// Reach prepares a client of the person with a token that trusts the issuer of a mesh.
func Reach(m *material.Material, trustDomain, server, token string) (*Client, error) {
	roots, err := pki.LoadBundle(m.ServiceRoots())
	if err != nil {
		return nil, err
	}
	return Dial(Config{Server: server, TrustDomain: trustDomain, Roots: roots, Token: token})
}
