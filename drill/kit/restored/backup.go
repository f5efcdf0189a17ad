package restored

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// Backup is a copy of the database, and of the launch log of the same moment.
type Backup struct {
	dir  string
	logs map[string][]byte // the launch log's files by path
	// marker is the name of a file that is written into the copy as it is put back: Postgres ignores unknown files.
	marker string
	newer  map[string][]byte // what the launch log's files held when hideNewer replaced them
}

func logFiles(c *cluster.Cluster) []string {
	return []string{
		filepath.Join(c.Plan.InstanceDir, "launches.jsonl"),
		filepath.Join(c.Plan.InstanceDir, "launches.id"),
	}
}

// Take copies the database while its server is stopped, and waits until the mesh is well again.
func Take(ctx context.Context, m *mesh.Mesh, c *cluster.Cluster) (*Backup, error) {
	b := &Backup{
		dir: filepath.Join(c.Dir(), mesh.FreshName("backup")), logs: map[string][]byte{},
		marker: mesh.FreshName("put-back"), newer: map[string][]byte{},
	}
	err := c.Stores.Postgres.Offline(ctx, func(dataDir string) error {
		for _, path := range logFiles(c) {
			raw, err := os.ReadFile(path) // of our own mesh
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
	return b, await.Until(ctx, "every part of the mesh to be well after the backup", await.Limit, m.Well)
}

// copyWhole copies a directory with owners and modes.
func copyWhole(ctx context.Context, from, to string) error {
	// of our own mesh
	if out, err := exec.CommandContext(ctx, "cp", "-a", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("cp: %w: %s", err, out)
	}
	return nil
}

// PutBack replaces the database by the copy, with all services stopped, calls between and starts the services again.
func (b *Backup) PutBack(ctx context.Context, c *cluster.Cluster, between func(ctx context.Context) error) error {
	for _, p := range c.Processes() {
		if err := p.Stop(ctx); err != nil {
			return fmt.Errorf("stop %s: %w", p.Name, err)
		}
	}
	err := c.Stores.Postgres.Offline(ctx, func(dataDir string) error {
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
	return errors.Join(err, startAll(ctx, c))
}

func startAll(ctx context.Context, c *cluster.Cluster) error {
	for _, p := range c.Processes() {
		if err := p.Start(); err != nil {
			return err
		}
	}
	// A process that was stopped on purpose has ended as well: the number of its ends proves nothing here.
	return await.Until(ctx, "every service to be ready", await.Limit, func(ctx context.Context) error {
		for _, p := range c.Processes() {
			if err := p.Ready(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// InPlace returns nil if the database's directory is the copy.
func (b *Backup) InPlace(c *cluster.Cluster) error {
	_, err := os.Stat(filepath.Join(c.Dir(), "postgres", "data", b.marker))
	return err
}

// swapFiles writes the contents of files and keeps their former contents in was.
func swapFiles(files, was map[string][]byte) error {
	var errs []error
	for path, raw := range files {
		now, err := os.ReadFile(path) // of our own mesh
		if was[path] = now; err == nil {
			err = os.WriteFile(path, raw, 0o600)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// HideNewer hides from the services what is newer than the backup: it puts the launch log of that moment in place, and
// lets no agent come through to the node API.
func (b *Backup) HideNewer(c *cluster.Cluster) error {
	_, err := c.ShutOut(c.Plan.Addresses.Agents, true)
	return errors.Join(err, swapFiles(b.logs, b.newer))
}

// ShowNewer restores the newer launch log and the agents' access, and accepts the evidence that they then report.
func (b *Backup) ShowNewer(ctx context.Context, m *mesh.Mesh, c *cluster.Cluster) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), await.Limit)
	defer cancel()
	var errs []error
	for _, p := range c.Lifecycle {
		errs = append(errs, p.Stop(ctx))
	}
	errs = append(errs, swapFiles(b.newer, map[string][]byte{}))
	_, err := c.ShutOut(c.Plan.Addresses.Agents, false)
	errs = append(errs, err, startAll(ctx, c))
	_, err = AwaitMode(ctx, m)
	errs = append(errs, err)
	_, err = m.Client.Rollback.AcceptRollback(ctx, &readmodelv1.AcceptRollbackRequest{Reason: "drill"})
	return errors.Join(append(errs, err)...)
}
