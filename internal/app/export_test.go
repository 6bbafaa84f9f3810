package app

// DropPrivilege is tested in a process of its own: it cannot be undone.
var DropPrivilege = dropPrivilege
