package storage

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ProjectQuota limits directories by the project quota of ext4 and XFS, where the file system is mounted with it and
// the agent is root.
type ProjectQuota struct{}

// The kernel's ABI: ioctls and structures of <linux/fs.h> and <linux/quota.h>, the same on every 64-bit architecture.
const (
	ioctlGetXattr = 0x801c581f // FS_IOC_FSGETXATTR
	ioctlSetXattr = 0x401c5820 // FS_IOC_FSSETXATTR

	xflagProjectInherit = 0x200

	projectQuota  = 2
	cmdSetQuota   = 0x800008<<8 | projectQuota
	limitValid    = 0x1 // QIF_BLIMITS
	blockOfLimits = 1024
)

type fsxattr struct {
	xflags     uint32
	extsize    uint32
	nextents   uint32
	projid     uint32
	cowextsize uint32
	pad        [8]byte
}

type dqblk struct {
	blockHard, blockSoft, space uint64
	inodeHard, inodeSoft, inode uint64
	blockTime, inodeTime        uint64
	valid                       uint32
	_                           uint32
}

// Limit sets the directory's project, which all files made below inherit, and the project's limit in bytes. It returns
// false if the host does not support this.
func (ProjectQuota) Limit(dir string, project uint32, bytes int64) (bool, error) {
	f, err := os.Open(dir) // a directory of the store
	if err != nil {
		return false, fmt.Errorf("limit storage: %w", err)
	}
	defer func() { _ = f.Close() }()
	blocks := (uint64(max(bytes, 0)) + blockOfLimits - 1) / blockOfLimits
	limits := dqblk{blockHard: blocks, blockSoft: blocks, valid: limitValid}
	// The limit is set first: where that fails, the directory is left as it is.
	var attr fsxattr
	err = quotactl(f, project, &limits)
	if err == nil {
		err = ioctl(f, ioctlGetXattr, &attr)
	}
	if err == nil {
		attr.projid = project
		attr.xflags |= xflagProjectInherit
		err = ioctl(f, ioctlSetXattr, &attr)
	}
	switch {
	case err == nil:
		return true, nil
	case unsupported(err):
		return false, nil
	default:
		return false, fmt.Errorf("limit storage: %w", err)
	}
}

// Project returns the directory's project id; zero if it has none or it cannot be read.
func (ProjectQuota) Project(dir string) uint32 {
	f, err := os.Open(dir) // a directory of the store
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }()
	var attr fsxattr
	if err := ioctl(f, ioctlGetXattr, &attr); err != nil {
		return 0
	}
	return attr.projid
}

// unsupported reports whether err is that of a kernel, file system or mount without project quota, or of an agent that
// is not root.
func unsupported(err error) bool {
	errno, ok := errors.AsType[unix.Errno](err)
	return ok && slices.Contains([]unix.Errno{
		unix.ENOSYS, unix.ENOTTY, unix.EOPNOTSUPP, unix.ESRCH, unix.EINVAL, unix.ENOTBLK,
		unix.EPERM, unix.ENODEV,
	}, errno)
}

func quotactl(f *os.File, project uint32, limits *dqblk) error {
	//nolint:gosec // the kernel's ABI
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, f.Fd(), cmdSetQuota, uintptr(project),
		uintptr(unsafe.Pointer(limits)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func ioctl(f *os.File, request uintptr, attr *fsxattr) error {
	//nolint:gosec // the kernel's ABI
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(attr)))
	if errno != 0 {
		return errno
	}
	return nil
}
