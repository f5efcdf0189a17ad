// Package compose prepares the files that the containers of docker-compose.yaml need and that no image may hold.
//
// It owns one directory of state, laid out by package material, with the passwords of the stores beside it. It keeps
// what exists there: no existing file is made anew. It starts no container and contacts none. Guarantees: Prepare may
// be run any number of times; only the configured owner can read a secret.
package compose

import (
	"crypto/rand"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/mesh/mesh/material"
)

// The names by which the containers reach each other.
const (
	postgresAddr = "postgres:5432"
	redisAddr    = "redis:6379"
	superuser    = "postgres"
)

// Config describes what to prepare, and for which users and hosts.
type Config struct {
	Dir         string // absolute
	TrustDomain string
	Hosts       []string // by which people and machines reach the published ports, beside localhost
	// UID and GID are those that the services run as and that own the files; negative: those of the caller.
	UID, GID int
}

// State gives the paths of everything that was prepared.
type State struct{ material.Layout }

// PostgresPassword returns the file of the superuser's password, for the container that makes the cluster.
func (s State) PostgresPassword() string {
	return filepath.Join(s.Dir, "database", "postgres.password")
}

// AdminURL returns the file of the superuser's connection string, for `gpuaas migrate`.
func (s State) AdminURL() string { return filepath.Join(s.Dir, "database", "admin.url") }

// RolePasswords returns the file with the YAML map of role to password, for `gpuaas migrate`.
func (s State) RolePasswords() string { return filepath.Join(s.Dir, "database", "roles.yaml") }

// RedisPassword returns the file of the password of Redis.
func (s State) RedisPassword() string { return filepath.Join(s.Dir, "database", "redis.password") }

// StepCAPassword returns the file of the password of the keys of the authority that runs in a container of its own.
func (s State) StepCAPassword() string { return filepath.Join(s.Dir, "step-ca", "password") }

// ClientDir returns the directory of the token of the person who uses the mesh.
func (s State) ClientDir() string { return filepath.Join(s.Dir, "client") }

// BundleDir returns the directory of the files that a new machine enrols with.
func (s State) BundleDir() string { return filepath.Join(s.Dir, "bundle") }

// Prepare makes all files that are missing.
func Prepare(cfg Config) (State, error) {
	s := State{material.Layout{Dir: cfg.Dir}}
	if err := prepare(s, cfg); err != nil {
		return s, fmt.Errorf("prepare containers: %w", err)
	}
	return s, nil
}

func prepare(s State, cfg Config) error {
	m, err := material.Make(material.Config{
		Dir: cfg.Dir, TrustDomain: cfg.TrustDomain, Hosts: append(append([]string{}, material.Services()...), cfg.Hosts...),
	})
	if err != nil {
		return err
	}
	for _, dir := range []string{s.ClientDir(), s.BundleDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
	}
	if _, err := material.Secret(s.StepCAPassword(), rand.Text); err != nil {
		return fmt.Errorf("draw password of step-ca: %w", err)
	}
	if err := s.redis(); err != nil {
		return err
	}
	if err := s.postgres(m); err != nil {
		return err
	}
	if cfg.UID < 0 || cfg.GID < 0 {
		return nil
	}
	return own(cfg.Dir, cfg.UID, cfg.GID)
}

func (s State) postgres(m *material.Material) error {
	password, err := material.Secret(s.PostgresPassword(), rand.Text)
	if err != nil {
		return fmt.Errorf("draw password of postgres: %w", err)
	}
	// The containers' network is theirs alone, and the image of Postgres has no certificate.
	admin := url.URL{
		Scheme: "postgres", User: url.UserPassword(superuser, password), Host: postgresAddr, Path: "/postgres",
		RawQuery: "sslmode=disable",
	}
	if err := material.Keep(s.AdminURL(), admin.String()+"\n"); err != nil {
		return err
	}
	roles, err := yaml.Marshal(m.Passwords)
	if err != nil {
		return fmt.Errorf("render passwords of roles: %w", err)
	}
	if err := material.Keep(s.RolePasswords(), string(roles)); err != nil {
		return err
	}
	return m.Connect(material.Database{URL: admin.String()})
}

func (s State) redis() error {
	password, err := material.Secret(s.RedisPassword(), rand.Text)
	if err != nil {
		return fmt.Errorf("draw password of redis: %w", err)
	}
	u := url.URL{Scheme: "redis", User: url.UserPassword("", password), Host: redisAddr, Path: "/0"}
	return material.Keep(s.RedisURLFile(), u.String()+"\n")
}

// own gives everything below dir to the user and group that run the services.
func own(dir string, uid, gid int) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("open directory: %w", err)
	}
	defer root.Close()
	err = fs.WalkDir(root.FS(), ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return root.Lchown(path, uid, gid)
	})
	if err != nil {
		return fmt.Errorf("give files to %d:%d: %w", uid, gid, err)
	}
	return nil
}
