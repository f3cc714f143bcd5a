"""Administration: storages, groups of instances, instances, accounts."""

import time
from itertools import islice
from typing import Any, Final

from hisparse.errors import quoted
from hisparse.kvcm.accounts import make_account
from hisparse.kvcm.blocks import AT_ONCE, end_session, trim
from hisparse.kvcm.state import Group, Instance, State
from hisparse.kvcm.storages import Storage, check_part
from hisparse.kvcm.wire import PROTO, ServiceError


def invalid(message: str) -> ServiceError:
    """The error of a request that cannot be right."""
    return ServiceError("INVALID_ARGUMENT", message)


def _failed(message: str) -> ServiceError:
    return ServiceError("INTERNAL_ERROR", message)


def require(message: Any, *names: str) -> None:
    """Refuse a message without one of these fields.

    Args:
        message: a request or a part of one.
        names: of fields; "a.b" is a field of the field a.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    for path in names:
        value = message
        for name in path.split("."):
            value = getattr(value, name)
        empty = not value.ByteSize() if hasattr(value, "ByteSize") else not value
        if empty:
            raise invalid(f"{path}: got nothing, expected a value")


class Registry:
    """Changes to the configuration, one after another.

    Args:
        state: to change.

    Attributes:
        lock: of who changes it.
    """

    def __init__(self, state: State) -> None:
        self._state, self.lock = state, state.lock

    # -- Storages ---------------------------------------------------------------------------

    def storage(self, name: str) -> Storage:
        """A storage that there is; else INTERNAL_ERROR."""
        try:
            return self._state.storages[name]
        except KeyError:
            raise _failed(f"storage: got {quoted(name)}, expected one of those listed") from None

    async def add_storage(self, config: Any) -> None:
        """Add a storage, which is available at once."""
        async with self.lock:
            name = config.global_unique_name
            if name in self._state.storages:
                raise _failed(f"storage {quoted(name)}: got one that exists, expected a new name")
            storage = Storage(self._state.new_number(), config, True)
            await self._state.writer.write({storage.number: storage.record()})
            self._state.storages[name] = storage

    async def enable(self, name: str, enabled: bool) -> None:
        """Show a storage's blocks and write to it, or neither."""
        async with self.lock:
            storage = self.storage(name)
            before, storage.enabled = storage.enabled, enabled
            storage.worked = storage.is_kept = False  # Whoever enables it may have emptied it.
            try:
                await self._state.writer.write({storage.number: storage.record()})
            except OSError:
                storage.enabled = before
                raise

    async def remove_storage(self, name: str) -> None:
        """Forget a storage and its blocks; its files stay."""
        async with self.lock:
            storage = self.storage(name)
            storage.enabled = False
            await self._forget_blocks(storage)
            await self._state.writer.write({storage.number: None})
            del self._state.storages[name]

    async def update_storage(self, config: Any, force: bool) -> None:
        """Replace a storage's configuration. If it has blocks, only force moves its root."""
        async with self.lock:
            old = self.storage(config.global_unique_name)
            new = Storage(old.number, config, old.enabled)
            moves = force and old.moves_to(new)
            if not force:
                self.check_move(old, new)
            old.enabled = False  # No write begins below the old root.
            try:
                if moves:
                    await self._forget_blocks(old)
                await self._state.writer.write({old.number: new.record()})
                old.configure(config)
            finally:
                old.enabled = new.enabled

    def check_move(self, old: Storage, new: Storage) -> None:
        """Refuse another root for a storage that has blocks."""
        holds = any(x.blocks.get(old) for x in self._state.instances.values())
        if holds and old.moves_to(new):
            text = "got another root and blocks below the old one, expected force_update"
            raise _failed(f"storage {quoted(old.name)}: {text}")

    async def _forget_blocks(self, storage: Storage) -> None:
        state = self._state
        for session in list(state.sessions.values()):
            if any(block.file.storage is storage for block in session.blocks):
                del state.sessions[session.id]
                await state.writer.write({session.number: None})
        for instance in list(state.instances.values()):
            blocks = instance.blocks.get(storage)
            while blocks:
                some = list(islice(blocks.values(), AT_ONCE))
                for block in some:
                    state.drop(block)
                await state.writer.write({block.number: None for block in some})

    # -- Groups -----------------------------------------------------------------------------

    def group(self, name: str) -> Group:
        """A group that there is; else INTERNAL_ERROR."""
        try:
            return self._state.groups[name]
        except KeyError:
            choices = ", ".join(self._state.groups) or "none"
            raise _failed(
                f"instance group: got {quoted(name)}, expected one of: {choices}"
            ) from None

    async def create_group(self, config: Any) -> None:
        """Add a group of instances."""
        check_group(config)
        async with self.lock:
            if config.name in self._state.groups:
                text = "got one that exists, expected a new name"
                raise _failed(f"instance group {quoted(config.name)}: {text}")
            group = Group(self._state.new_number(), config)
            await self._state.writer.write({group.number: group.record()})
            self._state.groups[config.name] = group

    async def update_group(self, config: Any, current_version: int) -> None:
        """Replace a group's configuration, if nobody did so in between."""
        check_group(config)
        async with self.lock:
            group = self.group(config.name)
            version = group.config.version
            if current_version != version:
                raise _failed(f"current_version: got {current_version}, expected {version}")
            if config.version <= version:
                raise _failed(f"version: got {config.version}, expected more than {version}")
            await self._state.writer.write({group.number: Group(group.number, config).record()})
            group.config = config

    async def remove_group(self, name: str) -> None:
        """Remove a group without instances."""
        async with self.lock:
            group = self.group(name)
            used = [x.id for x in self._state.instances.values() if x.group is group]
            if used:
                text = f"got {len(used)} instances, expected none"
                raise _failed(f"instance group {quoted(name)}: {text}")
            await self._state.writer.write({group.number: None})
            del self._state.groups[name]

    # -- Instances --------------------------------------------------------------------------

    async def register(self, request: Any) -> Instance:
        """Add an instance, or find the one of this id if it is the same."""
        info = instance_info(request)
        async with self.lock:
            known = self._state.instances.get(info.instance_id)
            group = self.group(info.instance_group_name)
            if known is not None:
                check_same(known.info, info)
                return self.instance(info.instance_id)
            info.quota_group_name = group.config.global_quota_group_name
            instance = Instance(self._state.new_number(), info, group)
            await self._make_room(group)
            await self._state.writer.write({instance.number: instance.record()})
            self._state.instances[info.instance_id] = instance
            return instance

    async def _make_room(self, group: Group) -> None:
        """Remove the longest unused instance of a full group, of those without blocks.

        Raises:
            ServiceError: REACH_MAX_ENTITY_CAPACITY: all have blocks.
        """
        most = group.config.max_instance_count
        instances = [x for x in self._state.instances.values() if x.group is group]
        if not most or len(instances) < most:
            return
        unused = min((x for x in instances if not x.num_keys), key=lambda x: x.used, default=None)
        if unused is None:
            text = f"got {len(instances)} instances with blocks, expected fewer than {most}"
            raise ServiceError("REACH_MAX_ENTITY_CAPACITY", f"max_instance_count: {text}")
        await self._remove(unused)

    # -- Accounts ---------------------------------------------------------------------------

    async def add_account(self, request: Any) -> None:
        """Add an account."""
        async with self.lock:
            if request.user_name in self._state.accounts:
                text = "got one that exists, expected a new name"
                raise _failed(f"account {quoted(request.user_name)}: {text}")
            account = await make_account(self._state.new_number(), request)
            await self._state.writer.write({account.number: account.record()})
            self._state.accounts[account.name] = account

    async def delete_account(self, name: str) -> None:
        """Delete an account; it is logged out at once."""
        async with self.lock:
            account = self._state.accounts.get(name)
            if account is None:
                raise _failed(f"account: got {quoted(name)}, expected one of those listed")
            await self._state.writer.write({account.number: None})
            del self._state.accounts[name]

    def instance(self, name: str) -> Instance:
        """An instance that there is, which is used now; else INSTANCE_NOT_EXIST."""
        try:
            instance = self._state.instances[name]
            instance.used = time.time()
            return instance
        except KeyError:
            raise ServiceError(
                "INSTANCE_NOT_EXIST", f"instance: got {quoted(name)}, expected a registered one"
            ) from None

    async def remove_instance(self, group: str, name: str) -> None:
        """Remove an instance, its writes and its blocks."""
        async with self.lock:
            instance = self.instance(name)
            if group and group != instance.group.config.name:
                raise _failed(f"instance_group: got {quoted(group)}, expected the instance's")
            await self._remove(instance)

    async def _remove(self, instance: Instance) -> None:
        instance.removed = True
        del self._state.instances[instance.id]
        changes: dict[int, bytes | None] = {instance.number: instance.record()}
        if not instance.num_keys:
            changes[instance.number] = None
        sessions = [x for x in self._state.sessions.values() if x.instance is instance]
        for session in sessions:
            del self._state.sessions[session.id]
        await self._state.writer.write(changes)
        for session in sessions:
            await end_session(self._state, session, [])
        await trim(self._state, instance)


#: Specs of an instance, and groups of them.
_MAX_SPECS: Final = 1024


def check_group(config: Any) -> None:
    """Refuse a group that lacks what every group has.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    index = "cache_config.meta_indexer_config"
    require(
        config, "name", "storage_candidates", "global_quota_group_name", "cache_config",
        "cache_config.data_storage_strategy", "cache_config.reclaim_strategy.storage_unique_name",
        f"{index}.meta_storage_backend_config.storage_type",
        f"{index}.meta_cache_policy_config.type",
    )  # fmt: skip
    check_numbers(config)


def check_numbers(config: Any) -> None:
    """Refuse negative numbers in the configuration of a group.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    strategy = config.cache_config.reclaim_strategy
    for message, names in (
        (config, ("max_instance_count",)),
        (config.quota, ("capacity",)),
        *((quota, ("capacity",)) for quota in config.quota.quota_config),
        (strategy.trigger_strategy, ("used_size", "used_percentage")),
        (strategy, ("trigger_period_seconds", "reclaim_step_size", "reclaim_step_percentage",
                    "delay_before_delete_ms")),
        (config.cache_config.meta_indexer_config, ("max_key_count",)),
    ):  # fmt: skip
        for name in names:
            if not (value := getattr(message, name)) >= 0:  # It may be no number.
                raise invalid(f"{name}: got {value}, expected at least 0")


def instance_info(request: Any) -> Any:
    """The ``InstanceInfo`` that a request registers.

    Raises:
        ServiceError: INVALID_ARGUMENT.
    """
    require(
        request, "instance_group", "instance_id", "model_deployment.model_name",
        "model_deployment.dtype", "location_spec_infos",
    )  # fmt: skip
    info = PROTO.InstanceInfo(
        instance_group_name=request.instance_group,
        instance_id=request.instance_id,
        block_size=request.block_size,
    )
    info.model_deployment.CopyFrom(request.model_deployment)
    for field in ("location_spec_infos", "location_spec_groups"):
        if (count := len(getattr(request, field))) > _MAX_SPECS:
            raise invalid(f"{field}: got {count}, expected at most {_MAX_SPECS}")
    names = set()
    check_part("instance_id", request.instance_id)
    for spec in request.location_spec_infos:
        require(spec, "name")
        check_part("location_spec_infos.name", spec.name)
        if spec.size < 0:
            raise invalid(f"size of {spec.name}: got {spec.size}, expected bytes")
        if spec.name in names:
            raise invalid(f"location_spec_infos: got {spec.name} twice, expected different names")
        names.add(spec.name)
        info.location_spec_infos.add(name=spec.name, size=spec.size)
    for group in request.location_spec_groups:
        unknown = sorted(set(group.spec_names) - names)
        if not group.name or not group.spec_names or unknown:
            text = f"got {quoted(unknown or group.name)}, expected names and specs of these"
            raise invalid(f"location_spec_groups: {text}: {', '.join(sorted(names))}")
        info.location_spec_groups.add(name=group.name, spec_names=group.spec_names)
    return info


def check_same(known: Any, new: Any) -> None:
    """Refuse to register an instance in another way than before.

    Raises:
        ServiceError: DUPLICATE_ENTITY.
    """

    def compared(info: Any) -> Any:
        copy = PROTO.InstanceInfo()
        copy.CopyFrom(info)
        copy.model_deployment.ClearField("user_data")
        copy.ClearField("instance_group_name")  # Upstream does not compare it either.
        copy.ClearField("quota_group_name")
        return copy

    one, other = compared(known), compared(new)
    for field in one.DESCRIPTOR.fields:
        if getattr(one, field.name) != getattr(other, field.name):
            raise ServiceError(
                "DUPLICATE_ENTITY",
                f"instance {quoted(known.instance_id)}: got another {field.name}, expected the "
                "registered one",
            )
