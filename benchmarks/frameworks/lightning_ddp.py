"""The one job in Lightning's Trainer: you write a step, the loop is Lightning's.

    CPU   python benchmarks/frameworks/lightning_ddp.py
    GPU   the same

Source: Lightning's documentation, "LightningModule" and "Trainer".
"""

import lightning as L
from torch.utils.data import DataLoader, DistributedSampler

import framework_job as job


class LightningDDPModule(L.LightningModule):
    """The model, its loss, its optimizer, its data, and the record of each step."""

    def __init__(self, args):
        super().__init__()
        self.args = args
        self.model = job.build_model(args)

    def train_dataloader(self):
        trainer = self.trainer
        dataset = job.build_dataset(self.args)
        sampler = DistributedSampler(
            dataset, trainer.world_size, trainer.global_rank, shuffle=False
        )
        return DataLoader(dataset, self.args.micro_batch_size, sampler=sampler)

    def configure_optimizers(self):
        optimizer, schedule = job.build_optimizer(self.model, self.args)
        # Without the interval the schedule would take one step per epoch.
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_start(self):
        trainer = self.trainer
        self.record = job.Record(self.args, trainer.global_rank, trainer.world_size)

    def training_step(self, batch, batch_index):
        return job.loss_of(self.model, *batch)

    def on_train_batch_end(self, outputs, batch, batch_index):
        self.record.step(outputs["loss"])


def train(args):
    module = LightningDDPModule(args)
    trainer = L.Trainer(
        accelerator=args.device,
        devices=args.world_size,
        strategy="ddp",
        use_distributed_sampler=False,  # else Lightning puts in one that shuffles
        max_steps=args.max_steps,
        gradient_clip_val=job.MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module.record.finish(
        lambda values: trainer.strategy.reduce(values, reduce_op="mean")
    )


if __name__ == "__main__":
    job.run(train, __doc__)
