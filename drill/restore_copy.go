package drill

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// backup is a copy of the database, and of the launch log of the same moment.
type backup struct {
	dir  string
	logs map[string][]byte // the launch log's files by path
	// marker is the name of a file that is written into the copy as it is put back: Postgres ignores unknown files.
	marker string
}

func (m *Mesh) logFiles() []string {
	return []string{
		filepath.Join(m.cluster.Plan.InstanceDir, "launches.jsonl"),
		filepath.Join(m.cluster.Plan.InstanceDir, "launches.id"),
	}
}

// backUp copies the database while its server is stopped, and waits until the mesh is well again.
func (m *Mesh) backUp(ctx context.Context) (*backup, error) {
	b := &backup{
		dir: filepath.Join(m.cluster.Dir(), fresh("backup")), logs: map[string][]byte{},
		marker: fresh("put-back"),
	}
	err := m.cluster.Stores.Postgres.Offline(ctx, func(dataDir string) error {
		for _, path := range m.logFiles() {
			raw, err := os.ReadFile(path) //nolint:gosec // of our own mesh
			if err != nil {
				return err
			}
			b.logs[path] = raw
		}
		return copyWhole(ctx, dataDir, b.dir)
	})
	if err != nil {
		return nil, fmt.Errorf("copy the database: %w", err)
	}
	return b, await(ctx, "every part of the mesh to be well after the backup", settle, m.well)
}

// copyWhole copies a directory with owners and modes.
func copyWhole(ctx context.Context, from, to string) error {
	//nolint:gosec // of our own mesh
	if out, err := exec.CommandContext(ctx, "cp", "-a", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("cp: %w: %s", err, out)
	}
	return nil
}

// putBack replaces the database by the copy, with all services stopped, calls between and starts the services again.
func (m *Mesh) putBack(ctx context.Context, b *backup, between func(ctx context.Context) error) error {
	for _, p := range m.cluster.Processes() {
		if err := p.Stop(ctx); err != nil {
			return fmt.Errorf("stop %s: %w", p.Name, err)
		}
	}
	err := m.cluster.Stores.Postgres.Offline(ctx, func(dataDir string) error {
		if err := os.RemoveAll(dataDir); err != nil {
			return err
		}
		if err := copyWhole(ctx, b.dir, dataDir); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dataDir, b.marker), nil, 0o600)
	})
	if err == nil && between != nil {
		err = between(ctx)
	}
	return errors.Join(err, m.startAll(ctx))
}

func (m *Mesh) startAll(ctx context.Context) error {
	for _, p := range m.cluster.Processes() {
		if err := p.Start(); err != nil {
			return err
		}
	}
	// A process that was stopped on purpose has ended as well: the number of its ends proves nothing here.
	return await(ctx, "every service to be ready", settle, func(ctx context.Context) error {
		for _, p := range m.cluster.Processes() {
			if err := p.Ready(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// dataDir returns the directory of the database.
func (m *Mesh) dataDir() string { return filepath.Join(m.cluster.Dir(), "postgres", "data") }

// swapFiles writes the contents of files and keeps their former contents in was.
func swapFiles(files, was map[string][]byte) error {
	var errs []error
	for path, raw := range files {
		now, err := os.ReadFile(path) //nolint:gosec // of our own mesh
		if was[path] = now; err == nil {
			err = os.WriteFile(path, raw, 0o600)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// unmutate restores the newer launch log and the agents' access, and accepts the evidence that they then report.
func (m *Mesh) unmutate(ctx context.Context, newer map[string][]byte) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settle)
	defer cancel()
	var errs []error
	for _, p := range m.cluster.Lifecycle {
		errs = append(errs, p.Stop(ctx))
	}
	errs = append(errs, swapFiles(newer, map[string][]byte{}))
	_, err := m.cluster.ShutOut(m.cluster.Plan.Addresses.Agents, false)
	errs = append(errs, err, m.startAll(ctx), await(ctx, "rollback mode", settle, func(ctx context.Context) error {
		answer, err := m.Client.Rollback.GetRollback(ctx, &readmodelv1.GetRollbackRequest{})
		if err == nil && !answer.GetRollback().GetActive() {
			err = errors.New("it is not set")
		}
		return err
	}))
	_, err = m.Client.Rollback.AcceptRollback(ctx, &readmodelv1.AcceptRollbackRequest{Reason: "drill"})
	return errors.Join(append(errs, err)...)
}
