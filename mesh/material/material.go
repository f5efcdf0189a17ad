package material

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/secretenv"
)

const (
	// DefaultTTL is the life of a service's certificate.
	DefaultTTL = 90 * 24 * time.Hour
	// renewShare is the share of its life, 1/renewShare, that a certificate must have left.
	renewShare = 3
)

// Config describes what to make.
type Config struct {
	Dir         string
	TrustDomain string
	// Hosts are the DNS names and addresses that the services are reached by, beside localhost and the loopback addresses.
	Hosts []string
	TTL   time.Duration // of services' certificates; default DefaultTTL
	Now   func() time.Time
}

// Material gives access to the keys and files that were made.
type Material struct {
	Layout

	cfg      Config
	services *ca.ServiceCA
	// Passwords of the database roles.
	Passwords map[string]string
}

// Make makes everything that is missing.
func Make(cfg Config) (*Material, error) {
	if cfg.TTL == 0 {
		cfg.TTL = DefaultTTL
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if !filepath.IsAbs(cfg.Dir) {
		return nil, fmt.Errorf("make material: directory %q is not absolute", cfg.Dir)
	}
	m := &Material{Layout: Layout{Dir: cfg.Dir}, cfg: cfg, Passwords: map[string]string{}}
	// A service's certificate is replaced in two files; the lock keeps them a pair.
	err := pki.WithLock(filepath.Join(cfg.Dir, ".lock"), func() error {
		for _, step := range []func() error{m.authorities, m.certificates, m.keys, m.passwords} {
			if err := step(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("make material: %w", err)
	}
	return m, nil
}

func (m *Material) authorities() error {
	for _, dir := range []string{
		m.ServiceCADir(), m.NodeCADir(), m.JoinStateKeyDir(), m.TaskKeyDir(),
		m.AssertionKeyDir(),
	} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
	}
	var err error
	if m.services, err = ca.OpenServiceCA(m.ServiceCADir(), m.cfg.TrustDomain, m.cfg.Hosts...); err != nil {
		return err
	}
	nodes, err := ca.Open(ca.Config{Dir: m.NodeCADir(), TrustDomain: m.cfg.TrustDomain})
	if err != nil {
		return err
	}
	return nodes.Close()
}

func (m *Material) certificates() error {
	_, err := m.renewLocked()
	return err
}

func (m *Material) keys() error {
	join, err := joinstate.LoadOrCreateKeys(m.JoinStateKeyDir())
	if err != nil {
		return err
	}
	joinSet, err := join.Public()
	if err != nil {
		return err
	}
	task, err := envelope.LoadOrCreateKey(m.TaskKey())
	if err != nil {
		return err
	}
	taskSet, err := pki.NewKeySet(task.Public())
	if err != nil {
		return err
	}
	assertion, err := pki.LoadOrCreateSigningKey(m.AssertionKey())
	if err != nil {
		return err
	}
	public, ok := assertion.Public().(ed25519.PublicKey)
	if !ok {
		return errors.New("the assertion key is not Ed25519")
	}
	assertionSet, err := pki.NewKeySet(public)
	if err != nil {
		return err
	}
	for path, set := range map[string]*pki.KeySet{
		m.JoinStatePubkeys(): joinSet, m.TaskPubkeys(): taskSet,
		m.AssertionPubkeys(): assertionSet,
	} {
		if err := Keep(path, set.String()+"\n"); err != nil {
			return err
		}
	}
	// Everything that is derived from it must stay the same for as long as the mesh lives.
	if _, err = Secret(m.LifecycleSecret(), func() string { return rand.Text() + rand.Text() }); err != nil {
		return err
	}
	_, err = Secret(m.WorkloadSecretKeys(), secretenv.NewKey)
	return err
}

func (m *Material) passwords() error {
	for _, role := range append(pg.Roles(), pg.RoleOwner) {
		password, err := Secret(m.PasswordFile(role), rand.Text)
		if err != nil {
			return err
		}
		m.Passwords[role] = password
	}
	return nil
}

// Secret reads the secret of a file, or makes it; fresh draws one of printable characters.
func Secret(path string, fresh func() string) (string, error) {
	found, err := pki.Exists(path)
	if err != nil {
		return "", err
	}
	if !found {
		if err := Keep(path, fresh()+"\n"); err != nil {
			return "", err
		}
	}
	data, err := pki.ReadFile(path)
	if err != nil {
		return "", err
	}
	text := strings.TrimSpace(string(data))
	if text == "" {
		return "", fmt.Errorf("%s is empty: remove it, and it is made anew", path)
	}
	return text, nil
}

// Database describes how the databases are reached.
type Database struct {
	// URL is any connection string to the server whose user, password and database are replaced; Tenants is the same for
	// connections from workloads, which share no file system with the server. Empty means URL.
	URL, Tenants       string
	Database, Workload string // names; empty means the defaults
}

// Connect writes the file of every role's connection string.
func (m *Material) Connect(db Database) error {
	if db.Database == "" {
		db.Database = pg.DatabaseMesh
	}
	if db.Workload == "" {
		db.Workload = pg.DatabaseWorkloads
	}
	if db.Tenants == "" {
		db.Tenants = db.URL
	}
	for _, role := range append(pg.Roles(), pg.RoleOwner) {
		base, name := db.URL, db.Database
		if role == pg.RoleWorkloadAdmin {
			base, name = db.Tenants, db.Workload
		}
		full, err := pg.WithUser(base, role, m.Passwords[role], name)
		if err != nil {
			return fmt.Errorf("connect %s: %w", role, err)
		}
		if err := Keep(m.URLFile(role), full+"\n"); err != nil {
			return err
		}
	}
	return nil
}

// Keep writes a file durably unless it already has that content.
func Keep(path, content string) error {
	if have, err := pki.ReadFile(path); err == nil && string(have) == content {
		return nil
	}
	if err := pki.WriteFile(path, []byte(content)); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	return nil
}
