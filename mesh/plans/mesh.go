package plans

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/devstack/pgserver"
	"github.com/gpuaas/mesh/devstack/scratch"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/halt"
	"github.com/gpuaas/mesh/mesh/person"
)

// The names in a template. They have one width, so that their replacements fit into stored messages.
const (
	tenantName    = "tenant-00000"
	nodeName      = "node-000000"
	workspaceName = "w-00000000"
)

// Source describes how to make a template.
type Source struct {
	Agent   string // the agent's program; empty: beside this one
	Version string
	Ended   bool // the template has a workspace too that was recreated and decommissioned
	// Instances reports whether the machine of the template is an instance that was launched for its workspace, and not
	// one that was enrolled beforehand.
	Instances bool
	Logger    *slog.Logger
}

// Make starts a mesh, enrols one machine, provisions one workspace on it, and returns the rows once the mesh is at
// rest.
func Make(ctx context.Context, src Source) (*Template, error) {
	var tmpl *Template
	err := WithServer(ctx, src.Logger, func(ctx context.Context, server *pgserver.Server, dir string) error {
		var err error
		tmpl, err = makeTemplate(ctx, src, server, dir)
		return err
	})
	return tmpl, err
}

// Running is a mesh whose services run on a loaded fleet.
type Running struct {
	Mesh      *dev.Mesh
	ServerPID int    // of Postgres
	URL       string // logs in as the administrator
}

// Serve loads a fleet of the size, starts the services of a mesh on it, and calls fn while they run.
func Serve(ctx context.Context, src Source, size Size, fn func(ctx context.Context, r Running) error) error {
	return WithServer(ctx, src.Logger, func(ctx context.Context, server *pgserver.Server, dir string) error {
		tmpl, err := makeTemplate(ctx, src, server, dir)
		if err != nil {
			return err
		}
		url := server.AdminURLOf(pg.DatabaseMesh)
		if err := tmpl.Load(ctx, url, size); err != nil {
			return err
		}
		if err := tmpl.writeLaunches(size); err != nil {
			return err
		}
		if size.Schemas {
			if err := makeSchemas(ctx, url, server.AdminURLOf(pg.DatabaseWorkloads)); err != nil {
				return err
			}
		}
		return withMesh(ctx, src, server, dir, func(ctx context.Context, mesh *dev.Mesh) error {
			return fn(ctx, Running{Mesh: mesh, ServerPID: server.PID(), URL: url})
		})
	})
}

// WithServer calls fn with a database server and a temporary directory, and removes both.
//
// what is removed at the end may fail
func WithServer(
	ctx context.Context, logger *slog.Logger, fn func(ctx context.Context, server *pgserver.Server, dir string) error,
) (err error) {
	dir, err := scratch.Make(halt.Bench)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dir.Remove()) }()
	server, err := pgserver.Start(ctx, pgserver.Config{Dir: filepath.Join(dir.Path(), "pg"), Logger: logger})
	if err != nil {
		return fmt.Errorf("start the database: %w", err)
	}
	defer func() {
		stopCtx, stop := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		defer stop()
		err = errors.Join(err, server.Stop(stopCtx))
	}()
	return fn(ctx, server, dir.Path())
}

// makeTemplate makes the template with a mesh that it ends.
func makeTemplate(ctx context.Context, src Source, server *pgserver.Server, dir string) (*Template, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	var tmpl *Template
	err := withMesh(ctx, src, server, dir, func(ctx context.Context, mesh *dev.Mesh) error {
		var err error
		tmpl, err = fromMesh(ctx, src, mesh, server)
		return err
	})
	return tmpl, err
}

// withMesh calls fn while a mesh runs below a directory.
func withMesh(
	ctx context.Context, src Source, server *pgserver.Server, dir string, fn func(context.Context, *dev.Mesh) error,
) error {
	const free = "127.0.0.1:0"
	deps := dev.Deps{Logger: src.Logger, Out: io.Discard, Err: io.Discard, Version: src.Version, Began: time.Now()}
	mesh, err := dev.New(ctx, deps, dev.Config{
		DataDir: filepath.Join(dir, "mesh"), NoDemo: true, AgentBinary: src.Agent, DatabaseURL: server.AdminURL(),
		SeededDatabase: true,
		ConsoleAddr:    free, NodeAddr: free, EnrollAddr: free, MetricsAddr: free,
	})
	if err != nil {
		return fmt.Errorf("build the mesh of the template: %w", err)
	}
	return mesh.While(ctx, func(ctx context.Context) error { return fn(ctx, mesh) })
}

// fromMesh furnishes the mesh and captures its rows.
func fromMesh(ctx context.Context, src Source, mesh *dev.Mesh, server *pgserver.Server) (_ *Template, err error) {
	if !src.Instances {
		var stop func() error
		if stop, err = src.enrol(ctx, mesh); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	if err := src.provision(ctx, mesh.Client()); err != nil {
		return nil, err
	}
	// As the administrator: the event log shows the owner nothing.
	conn, err := pgx.Connect(ctx, server.AdminURLOf(pg.DatabaseMesh))
	if err != nil {
		return nil, fmt.Errorf("connect to the database of the template: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // nothing is kept
	if err := awaitRest(ctx, conn); err != nil {
		return nil, err
	}
	tmpl, err := capture(ctx, conn, src.Instances)
	if err != nil || !src.Instances {
		return tmpl, err
	}
	if tmpl.launches, err = readLaunches(mesh.Plan().InstanceDir); err != nil {
		return nil, err
	}
	return tmpl, nil
}

// enrol enrols the machine of the template and runs its agent until the function that it returns is called.
func (src Source) enrol(ctx context.Context, mesh *dev.Mesh) (func() error, error) {
	binary, err := agents.Find(src.Agent)
	if err != nil {
		return nil, err
	}
	plan := mesh.Plan()
	agent, err := agents.New(src.Logger, agents.Config{
		Name: nodeName, Dir: filepath.Join(mesh.Dir(), "agents", nodeName), Binary: binary, TrustDomain: plan.TrustDomain,
		GPUs: 8, APIURL: plan.Addresses.Agents, EnrollURL: "https://" + plan.Addresses.Enroll,
		CAFile: plan.Material.ServiceRoots(),
	})
	if err != nil {
		return nil, err
	}
	list := []*agents.Agent{agent}
	if err = agent.Furnish(""); err == nil {
		_, err = agents.Enrol(ctx, mesh.Client(), list)
	}
	if err != nil {
		return nil, fmt.Errorf("enrol the machine of the template: %w", err)
	}
	running, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(running) }()
	stop := func() error {
		cancel()
		return <-ended
	}
	if n, err := agents.Await(ctx, mesh.Client(), list, time.Minute); err != nil || n != 1 {
		return nil, errors.Join(errors.New("the machine of the template did not connect"), err, stop())
	}
	return stop, nil
}

// provision makes the tenant, the workspace that ends if there is to be one, and the workspace that stands.
func (src Source) provision(ctx context.Context, client *person.Client) error {
	if _, err := client.Command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{Name: tenantName}); err != nil {
		return fmt.Errorf("create the tenant of the template: %w", err)
	}
	driver := commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC
	if src.Instances {
		driver = commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS
	}
	if src.Ended {
		ws, err := client.Provision(ctx, tenantName, endedName, driver)
		if err == nil {
			err = client.RecreateAndEnd(ctx, ws, "template")
		}
		if err != nil {
			return fmt.Errorf("make the ended workspace of the template: %w", err)
		}
	}
	_, err := client.Provision(ctx, tenantName, workspaceName, driver)
	return err
}

// atRest reports whether the rows of the workspace that stands are there, those of its first report too, and nothing is
// under way. The rows of a workspace that has ended, which has the same tables, do not count.
var atRest = pg.Define(pg.RoleOwner, "plans.at_rest", `
	SELECT EXISTS (SELECT FROM lifecycle.workspace w WHERE w.name = $1
			AND EXISTS (SELECT FROM readmodel.observed o WHERE o.workspace_id = w.id)
			AND EXISTS (SELECT FROM lifecycle.observed_workload o WHERE o.workspace_id = w.id)
			AND EXISTS (SELECT FROM readmodel.run r WHERE r.workspace_id = w.id AND NOT r.live))
		AND NOT EXISTS (SELECT FROM lifecycle.saga_run r WHERE r.finished_at IS NULL)
		AND NOT EXISTS (SELECT FROM lifecycle.task t WHERE t.open)
		AND (SELECT min(c.pos) FROM readmodel.event_cursor c) >= (SELECT max(c.pos) FROM lifecycle.event_cursor c)`)

// awaitRest waits until the workspace's first report is projected and nothing is under way.
func awaitRest(ctx context.Context, conn *pgx.Conn) error {
	for {
		done, err := pg.Value[bool](ctx, conn, atRest, workspaceName)
		if err != nil {
			return fmt.Errorf("wait until the mesh of the template is at rest: %w", err)
		}
		if done {
			return nil
		}
		if !app.Sleep(ctx, 100*time.Millisecond) {
			return errors.New("the mesh of the template does not come to rest")
		}
	}
}
