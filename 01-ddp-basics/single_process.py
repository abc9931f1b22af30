"""Train a small network on handwritten digits in one process: the loop to distribute.

python 01-ddp-basics/single_process.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

gpu = torch.cuda.is_available()
device = torch.device("cuda", 0) if gpu else torch.device("cpu")

pixels, labels = load_digits(return_X_y=True)  # 1,797 images of 8 x 8 pixels, 0 to 16
dataset = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(labels))
loader = DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(5):
    total = torch.zeros((), device=device)
    for images, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    mean = total.item() / len(loader)
    print(f"epoch {epoch + 1}: loss {mean:.4f}")

torch.save(model.state_dict(), "digits.pt")
