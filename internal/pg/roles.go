package pg

import (
	"errors"
	"fmt"
	"net/url"
)

// The roles of the mesh.
const (
	RoleOwner         = "gpuaas_owner"
	RoleNodeAPI       = "nodeapi"
	RoleLifecycle     = "lifecycle"
	RoleRecovery      = "recovery"
	RoleReadmodel     = "readmodel"
	RoleSequencer     = "sequencer"
	RoleWorkloadAdmin = "workload_admin"
	// RoleRetention owns the functions that delete rows at the end of their retention, and never logs in.
	RoleRetention = "mesh_retention"
)

// Default database names.
const (
	DatabaseMesh      = "gpuaas"
	DatabaseWorkloads = "gpuaas_workloads"
)

// ServiceRoles returns the login roles of the mesh database, each with a schema of its name, and the sequencer without
// one.
func ServiceRoles() []string {
	return []string{RoleNodeAPI, RoleLifecycle, RoleRecovery, RoleReadmodel, RoleSequencer}
}

// Roles returns all login roles that need a password.
func Roles() []string { return append(ServiceRoles(), RoleWorkloadAdmin) }

// WithUser returns the connection string raw with another user, password and database; an empty database keeps it.
func WithUser(raw, user, password, database string) (string, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return "", fmt.Errorf("parse database url: %w", err)
	}
	if u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return "", errors.New("database url must begin with postgres://")
	}
	u.User = url.UserPassword(user, password)
	if database != "" {
		u.Path = "/" + database
	}
	return u.String(), nil
}
