// Package process launches instances as real agent processes on this host: the embedded default.
//
// Processes of an epoch that has ended according to the launch log (of a restored copy of the instance, or started by
// hand) are found and ended, and a line of the log records that.
//
// It owns the launch log, which it locks to decide and syncs before a decision takes effect; replicas of lifecycle on
// one host share it. An instance outlives lifecycle. Keep powers on an instance whose agent died, as a cloud provider
// restarts a machine: that is not a launch.
package process

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// Config of the driver.
type Config struct {
	Dir          string `yaml:"dir"`          // directory of the instances and the launch log
	AgentBinary  string `yaml:"agent_binary"` // gpuaas-node-agent
	EnrollURL    string `yaml:"enroll_url"`
	APIURL       string `yaml:"api_url"`
	CAFile       string `yaml:"ca_file"` // the CA bundle with which an instance verifies the control plane
	MaxInstances int    `yaml:"max_boxes"`
	MaxGPUs      int    `yaml:"max_gpus"`
	// The log and the diagnostics of an ended instance are kept as evidence and removed after KeepEnded (7 days), and
	// earlier if more than KeepEndedMax (1000) instances have ended.
	KeepEnded    time.Duration `yaml:"keep_ended"`
	KeepEndedMax int           `yaml:"keep_ended_max"`
	// RememberEnded is how long the launch log keeps an ended instance at least, also if the database has deleted its
	// workspace (90 days). It is longer than the age of any backup that may be restored: a database restored from before
	// the launch learns of it only from the log.
	RememberEnded time.Duration `yaml:"remember_ended"`
}

// Driver of processes.
type Driver struct {
	cfg       Config
	logger    *slog.Logger
	launchLog *launchLog

	mu      sync.Mutex
	off     bool
	backoff map[string]restart
}

// New makes the driver's directory and returns the driver.
func New(logger *slog.Logger, cfg Config) (*Driver, error) {
	abs, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("place instances: %w", err)
	}
	cfg.Dir = abs
	cfg.KeepEnded = cmp.Or(cfg.KeepEnded, 7*24*time.Hour)
	cfg.RememberEnded = cmp.Or(cfg.RememberEnded, 90*24*time.Hour)
	cfg.KeepEndedMax = cmp.Or(cfg.KeepEndedMax, 1000)
	// Workloads run as other users and must reach their own directories below; each instance's own files are closed by
	// their modes.
	if err := os.MkdirAll(filepath.Join(cfg.Dir, "boxes"), 0o711); err != nil { // traversable on purpose
		return nil, fmt.Errorf("make directory of instances: %w", err)
	}
	// The kernel names working directories by their real paths.
	if cfg.Dir, err = filepath.EvalSymlinks(cfg.Dir); err != nil {
		return nil, fmt.Errorf("place instances: %w", err)
	}
	return &Driver{cfg: cfg, logger: logger, launchLog: newLaunchLog(cfg.Dir), backoff: map[string]restart{}}, nil
}

func instanceID(workspaceID string, epoch int64) string {
	return workspaceID + "-" + strconv.FormatInt(epoch, 10)
}

// root is the directory that holds the instances' own.
func (d *Driver) root() string { return filepath.Join(d.cfg.Dir, "boxes") }

func (d *Driver) instanceDir(workspaceID string, epoch int64) string {
	return filepath.Join(d.root(), instanceID(workspaceID, epoch))
}

func providerID(workspaceID string, epoch int64) string {
	return "process:" + instanceID(workspaceID, epoch)
}

// Launch makes an instance, or returns the existing one if it is the requested instance.
func (d *Driver) Launch(ctx context.Context, b placement.LaunchRequest) (placement.Launched, error) {
	var out placement.Launched
	err := d.launchLog.with(ctx, func(l *content, write func(entry) error) error {
		k := instanceKey{b.WorkspaceID, b.Epoch}
		have := l.instances[k]
		if err := sameInstance(have, b); err != nil {
			return err
		}
		if have != nil && (have.Op == opLaunched || have.Op == opRestarted) {
			out = placement.Launched{ProviderID: providerID(b.WorkspaceID, b.Epoch), StartedAt: have.launchedAt}
			return nil // powered off or not, it is launched; Keep powers it on
		}
		if err := d.mayLaunch(l, b); err != nil {
			return err
		}
		if err := b.Permitted(ctx); err != nil {
			return err
		}
		e := entry{WorkspaceID: b.WorkspaceID, Epoch: b.Epoch, InstanceID: b.InstanceID, GPUs: b.GPUs}
		if have == nil {
			e.Op = opIntent
			if err := write(e); err != nil {
				return err
			}
		}
		if err := failpoint.Hit("lifecycle.launch.after_intent"); err != nil {
			return err
		}
		if err := d.furnish(b); err != nil {
			return fault.New(commonv1.Reason_REASON_LAUNCH_FAILED, "the instance's files could not be made", fault.Cause(err))
		}
		pid, err := d.start(b.WorkspaceID, b.Epoch, b.GPUs, killPoints())
		if err != nil {
			return fault.New(commonv1.Reason_REASON_LAUNCH_FAILED, "the instance's agent did not start", fault.Cause(err))
		}
		if err := failpoint.Hit("lifecycle.launch.after_start"); err != nil {
			return err
		}
		e.Op, e.PID, e.StartTicks = opLaunched, pid, startTicks(pid)
		if err := write(e); err != nil {
			return err
		}
		out = placement.Launched{ProviderID: providerID(b.WorkspaceID, b.Epoch), StartedAt: l.instances[k].launchedAt}
		return nil
	})
	if err != nil {
		return placement.Launched{}, fmt.Errorf("launch instance: %w", err)
	}
	return out, nil
}

// sameInstance refuses an instance other than the one that the log has at this epoch: only a history that the database
// lost can have launched that one.
func sameInstance(have *instance, b placement.LaunchRequest) error {
	if have == nil || have.Op == opEnded || have.Op == opEnding || have.InstanceID == b.InstanceID {
		return nil
	}
	return placement.LostHistory(providerID(b.WorkspaceID, b.Epoch), have.InstanceID, b)
}

// mayLaunch returns a fault if the rules of epochs or of capacity forbid the launch.
func (d *Driver) mayLaunch(l *content, b placement.LaunchRequest) error {
	if have := l.instances[instanceKey{b.WorkspaceID, b.Epoch}]; have != nil &&
		(have.Op == opEnded || have.Op == opEnding) {
		return fault.New(commonv1.Reason_REASON_EPOCH_ENDED, "this epoch of the workspace has ended")
	}
	if l.highest[b.WorkspaceID] > b.Epoch {
		return fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, "a later epoch of the workspace was launched")
	}
	instances, gpus := 0, 0
	for k, have := range l.live() {
		if k.workspaceID == b.WorkspaceID && k.epoch == b.Epoch {
			continue
		}
		if k.workspaceID == b.WorkspaceID && have.Fenced == "" {
			return fault.New(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE,
				"an earlier epoch of the workspace is not confirmed ended",
				fault.Conflicting(providerID(k.workspaceID, k.epoch)))
		}
		instances++
		gpus += int(have.GPUs)
	}
	if instances >= d.cfg.MaxInstances {
		return fault.New(commonv1.Reason_REASON_NO_CAPACITY,
			fmt.Sprintf("%d instances stand on this host, as many as it may hold", instances))
	}
	if gpus+int(b.GPUs) > d.cfg.MaxGPUs {
		return fault.New(commonv1.Reason_REASON_NO_CAPACITY,
			fmt.Sprintf("%d of %d GPUs of this host are taken", gpus, d.cfg.MaxGPUs))
	}
	return nil
}

// furnish writes the files that an instance boots from. Writing them again changes nothing.
func (d *Driver) furnish(b placement.LaunchRequest) error {
	dir := d.instanceDir(b.WorkspaceID, b.Epoch)
	etc := filepath.Join(dir, "etc")
	// The instance's own directory first: it is traversable by the users of its workloads, its keys are not.
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{{dir, 0o711}, {etc, 0o700}, {filepath.Join(dir, "state"), 0o711}} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return fmt.Errorf("make instance directory: %w", err)
		}
		// The umask, or an earlier attempt, may have left other permissions.
		if err := os.Chmod(d.path, d.mode); err != nil {
			return fmt.Errorf("open instance directory: %w", err)
		}
	}
	ca, err := os.ReadFile(d.cfg.CAFile)
	if err != nil {
		return fmt.Errorf("read trust of instances: %w", err)
	}
	bundle := filepath.Join(etc, "ca-bundle.crt")
	recoveryBundle := filepath.Join(etc, "recovery-ca-bundle.crt")
	env := strings.Join([]string{
		"GPUAAS_API_URL=" + d.cfg.APIURL,
		"GPUAAS_RECOVERY_API_URL=" + d.cfg.EnrollURL,
		"GPUAAS_RECOVERY_CA_BUNDLE_PATH=" + recoveryBundle,
		"GPUAAS_ENROLLMENT_TOKEN=" + b.LaunchSecret,
		"",
	}, "\n")
	for path, data := range map[string][]byte{bundle: ca, recoveryBundle: ca} {
		if err := pki.WriteFile(path, data); err != nil {
			return fmt.Errorf("write trust of instance: %w", err)
		}
	}
	file := filepath.Join(etc, "node-agent.env")
	if ok, err := pki.Exists(file); err != nil || ok {
		return err
	}
	if err := pki.WriteFile(file, []byte(env)); err != nil {
		return fmt.Errorf("write environment of instance: %w", err)
	}
	return nil
}

// start starts the agent of an instance and returns its pid. If one runs already, which a crash between a start and its
// record leaves behind, it returns that one's.
func (d *Driver) start(workspaceID string, epoch int64, gpus int32, environ []string) (int, error) {
	dir := d.instanceDir(workspaceID, epoch)
	procs, err := scan(d.root(), everything)
	if err != nil {
		return 0, err
	}
	for _, p := range procs[instanceID(workspaceID, epoch)] {
		if p.agent {
			return p.pid, nil
		}
	}
	log, err := os.OpenFile(filepath.Join(dir, "agent.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, fmt.Errorf("open instance log: %w", err)
	}
	defer log.Close() // the child has its own
	//nolint:noctx // the binary is the operator's configuration; an instance outlives every context of this process
	cmd := exec.Command(d.cfg.AgentBinary, "run", "--etc-dir", filepath.Join(dir, "etc"), "--state-dir",
		filepath.Join(dir, "state"), "--gpus", strconv.Itoa(int(gpus)))
	cmd.Env = []string{marker + "=" + dir, "PATH=" + os.Getenv("PATH"), "HOME=" + dir}
	cmd.Env = append(cmd.Env, environ...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start agent of instance: %w", err)
	}
	// The process that starts the agent reaps it, while it lives; nothing depends on that.
	go func() { _ = cmd.Wait() }()
	return cmd.Process.Pid, nil
}

// killPoints returns the environment of a drill's kill points. It is only for an instance's first start: an instance
// that is powered on again must get past the point at which it died.
func killPoints() []string {
	var out []string
	for _, name := range []string{"GPUAAS_FAILPOINT_REPORT", "GPUAAS_BOX_FAILPOINTS"} {
		if v := os.Getenv(name); v != "" {
			out = append(out, strings.Replace(name, "_BOX_", "_", 1)+"="+v)
		}
	}
	return out
}

// End ends an instance and confirms that nothing of it runs.
func (d *Driver) End(ctx context.Context, workspaceID string, epoch int64) error {
	ended := false
	err := d.launchLog.with(ctx, func(l *content, write func(entry) error) error {
		have := l.instances[instanceKey{workspaceID, epoch}]
		if ended = have != nil && have.Op == opEnded; ended || have != nil && have.Op == opEnding {
			return nil
		}
		return write(entry{Op: opEnding, WorkspaceID: workspaceID, Epoch: epoch})
	})
	if err != nil {
		return fmt.Errorf("end instance: %w", err)
	}
	if !ended {
		// Processes are ended without the log's lock: from `ending` on no replica launches the instance or powers it on, so
		// that others need not wait.
		if err := endAll(ctx, d.root(), everything, []string{instanceID(workspaceID, epoch)}, 3*time.Second); err != nil {
			return fmt.Errorf("end instance: %w", err)
		}
		if err := failpoint.Hit("lifecycle.end.after_kill"); err != nil {
			return err
		}
		err := d.launchLog.with(ctx, func(l *content, write func(entry) error) error {
			if l.instances[instanceKey{workspaceID, epoch}].Op == opEnded {
				return nil
			}
			return write(entry{Op: opEnded, WorkspaceID: workspaceID, Epoch: epoch})
		})
		if err != nil {
			return fmt.Errorf("end instance: %w", err)
		}
	}
	d.discard(workspaceID, epoch)
	return nil
}

// Fence lets later epochs be launched though this one is not confirmed ended. The instance counts against the capacity
// until it is.
func (d *Driver) Fence(ctx context.Context, workspaceID string, epoch int64, attestation string) error {
	err := d.launchLog.with(ctx, func(l *content, write func(entry) error) error {
		have := l.instances[instanceKey{workspaceID, epoch}]
		if have != nil && (have.Op == opEnded || have.Fenced != "") {
			return nil
		}
		return write(entry{Op: opEnding, WorkspaceID: workspaceID, Epoch: epoch, Fenced: attestation})
	})
	if err != nil {
		return fmt.Errorf("fence instance: %w", err)
	}
	return nil
}

// PowerOff stops everything that runs on the instances without ending them: the next Keep powers them on again. It is
// for a host that shuts down.
func (d *Driver) PowerOff(ctx context.Context) error {
	d.mu.Lock()
	d.off = true
	d.mu.Unlock()
	err := d.launchLog.with(ctx, func(l *content, _ func(entry) error) error {
		var live []string
		for k := range l.live() {
			live = append(live, instanceID(k.workspaceID, k.epoch))
		}
		return endAll(ctx, d.root(), everything, live, 2*time.Second)
	})
	if err != nil {
		return fmt.Errorf("power instances off: %w", err)
	}
	return nil
}
