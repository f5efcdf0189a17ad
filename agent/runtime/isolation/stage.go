package isolation

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/runtime/procfs"
)

// execWait is the time in which a released stage must become the workload.
const execWait = 30 * time.Second

// Order is the order to the stage before a workload: what it becomes, and as which user. It is sent over a pipe, so
// that no secret is in an argument list, nor in the environment of a process that is still root.
type Order struct {
	Argv []string          `json:"argv"`
	Env  map[string]string `json:"env"`
	Dir  string            `json:"dir"`
	UID  int               `json:"uid"` // -1: as the agent
}

// Stage is a process that will become the workload, seen from its shim.
type Stage struct {
	Child  procfs.Process
	orders *os.File // to the stage
	status *os.File // from the stage; closed by a successful exec
}

// NewStage starts a stage in a session of its own: the program at path, which with these arguments must call StageMain.
// The stage waits until Release, and ends if its shim does before that.
func NewStage(path string, args []string, out *os.File) (*Stage, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("open null device: %w", err)
	}
	defer func() { _ = null.Close() }()
	ordersIn, orders, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make pipe: %w", err)
	}
	defer func() { _ = ordersIn.Close() }()
	status, statusOut, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make pipe: %w", err), orders.Close())
	}
	defer func() { _ = statusOut.Close() }()
	p, err := os.StartProcess(path, args, &os.ProcAttr{
		Dir:   "/",
		Env:   []string{"GOMAXPROCS=1"},
		Files: []*os.File{null, out, out, ordersIn, statusOut},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	stage := &Stage{orders: orders, status: status}
	if err != nil {
		stage.Close()
		return nil, fmt.Errorf("start workload: %w", err)
	}
	stage.Child, err = procfs.Identify(p.Pid)
	if err != nil {
		_ = p.Kill()
		stage.Close()
		return nil, err
	}
	return stage, nil
}

// Close gives the stage up: one that was not released ends.
func (s *Stage) Close() {
	_ = s.orders.Close()
	_ = s.status.Close()
}

// Release lets the stage become the workload. It returns the text of the failure if the stage could not; empty if it
// did.
func (s *Stage) Release(order Order, run string) (string, error) {
	env := map[string]string{}
	maps.Copy(env, order.Env)
	env[runVariable] = run
	order.Env = env
	data, err := json.Marshal(order)
	if err == nil {
		_, err = s.orders.Write(data)
	}
	if err := errors.Join(err, s.orders.Close()); err != nil {
		return "", fmt.Errorf("release workload: %w", err)
	}
	_ = s.status.SetReadDeadline(time.Now().Add(execWait))
	why, err := io.ReadAll(io.LimitReader(s.status, 4096))
	if err != nil {
		return "", fmt.Errorf("wait for workload to execute: %w", err)
	}
	return string(why), nil
}

// StageMain is the main function of the stage: it waits for its order, drops its rights, and becomes the workload under
// the same pid.
func StageMain() int {
	// The no_new_privs bit belongs to a thread, so the thread that sets it must be the one that executes the workload.
	runtime.LockOSThread()
	orders, status := os.NewFile(3, "orders"), os.NewFile(4, "status")
	unix.CloseOnExec(3)
	unix.CloseOnExec(4)
	data, err := io.ReadAll(orders)
	var o Order
	if err != nil || json.Unmarshal(data, &o) != nil || len(o.Argv) == 0 {
		return 1 // the shim is gone, or has given up the start
	}
	code, err := become(o)
	_, _ = io.WriteString(status, err.Error())
	return code
}

// become drops the rights and executes the workload. It returns only on failure, with the exit code and the error.
func become(o Order) (int, error) {
	if o.UID >= 0 {
		if err := errors.Join(syscall.Setgroups([]int{}), syscall.Setgid(o.UID), syscall.Setuid(o.UID)); err != nil {
			return 126, fmt.Errorf("drop rights: %w", err)
		}
		if syscall.Getuid() == 0 || syscall.Geteuid() == 0 {
			return 126, errors.New("drop rights: still root")
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 126, fmt.Errorf("forbid new privileges: %w", err)
	}
	syscall.Umask(0o027)
	if err := os.Chdir(o.Dir); err != nil {
		return 126, fmt.Errorf("enter working directory: %w", err)
	}
	env := make([]string, 0, len(o.Env))
	for k, v := range o.Env {
		env = append(env, k+"="+v)
	}
	path, err := findProgram(o.Argv[0], o.Env["PATH"])
	if err != nil {
		return 127, err
	}
	// what the tenant asked to run, without a shell, as the tenant's uid
	err = syscall.Exec(path, o.Argv, env)
	code := 126
	if errors.Is(err, fs.ErrNotExist) {
		code = 127
	}
	return code, fmt.Errorf("execute %q: %w", o.Argv[0], err)
}

// findProgram returns the path of a command. It looks up one without a slash in the workload's own PATH, as the
// workload's own user.
func findProgram(command, path string) (string, error) {
	if strings.Contains(command, "/") {
		return command, nil
	}
	for dir := range strings.SplitSeq(path, ":") {
		if !strings.HasPrefix(dir, "/") {
			continue
		}
		if found, err := exec.LookPath(dir + "/" + command); err == nil {
			return found, nil
		}
	}
	return "", fmt.Errorf("command %q is not in PATH %q", command, path)
}
